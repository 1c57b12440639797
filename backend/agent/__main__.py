"""The agent's command line: `serve` for a console, `VERB` with JSON on stdin for scripts, `exec` for batch systems.

    python agent.pyz serve                       one connection over stdin and stdout (see `protocol`)
    echo '{"limit":1}' | python agent.pyz snapshot
    echo '{"stage":"train"}' | python agent.pyz log
    python agent.pyz exec ATTEMPT_DIR            supervise one attempt in the foreground (inside a Slurm job)

User data comes on stdin, never as a word. A verb prints its JSON answer; `watch` and `log` print the file's bytes.
Errors are JSON on stdout and a sentence on stderr, the exit code is the error's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from backend.agent import protocol, server, verbs
from backend.errors import Exit, OperatorError, UsageError
from backend.runs import supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["serve"]:
        return _serve()
    if len(words) == 2 and words[0] == "exec":
        return supervisor.supervise(Path(words[1]))
    if len(words) != 1:
        sys.stderr.write(f"usage: agent serve | exec ATTEMPT_DIR | {' | '.join(sorted(_verbs()))}\n")
        return Exit.USAGE
    try:
        return asyncio.run(_once(words[0], sys.stdin.buffer.read()))
    except OperatorError as error:
        sys.stdout.buffer.write(protocol.pack(error.as_json()) + b"\n")
        sys.stderr.write(f"{error}\n")
        return int(error.code)


def _serve() -> int:
    """Frames go through private copies of the descriptors: a stray print must not land between them."""
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    with open(stdin, "rb", buffering=0) as requests, open(stdout, "wb", buffering=0) as answers:
        asyncio.run(server.serve_stdio(requests, answers))
    return Exit.OK


async def _once(verb: str, body: bytes) -> int:
    try:
        args = protocol.unpack(body)
    except protocol.ProtocolError as error:
        raise UsageError(f"{verb}: {error}", fix="give a JSON object on stdin", reason="bad_request") from error
    home = verbs.home_of(args)
    if verb in verbs.STREAMS:
        stream = verbs.STREAMS[verb](home, args)
        async for chunk in stream.chunks:
            if chunk.ch != "state":
                sys.stdout.buffer.write(chunk.body)
                sys.stdout.buffer.flush()
        return Exit.OK
    answer = verbs.hello(home) if verb == "hello" else await verbs.call(verb, home, args)
    sys.stdout.buffer.write(protocol.pack(answer) + b"\n")
    return Exit.OK


def _verbs() -> set[str]:
    return {"hello", *verbs.CALLS, *verbs.STREAMS}


if __name__ == "__main__":
    sys.exit(main())
