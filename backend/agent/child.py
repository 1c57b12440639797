"""Questions that need the configured interpreter: one child, JSON in on stdin, JSON out on stdout.

The agent itself runs on any Python with the standard library; planning reads the config with pydantic, so it runs as
`<configured python> -m backend.pilot VERB` with our own code on its path. Owns that call: no user data in argv, the
child's stderr passed on, the child killed when nobody waits for its answer any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import backend
from backend.agent import protocol
from backend.errors import Exit, OperatorError, UsageError


def code_root() -> str:
    """What has to stand on PYTHONPATH for `import backend`: the zipapp, or the checkout."""
    return str(Path(backend.__file__).parent.parent)


def code_path() -> str:
    """PYTHONPATH for a child: our code first, then what was there."""
    return os.pathsep.join(part for part in (code_root(), os.environ.get("PYTHONPATH", "")) if part)


async def ask_pilot(verb: str, python: str, home: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `<python> -m backend.pilot VERB` to `order`.

    The child runs in `home`, where no folder called `backend` can come before ours.

    Raises:
        UsageError: `python` cannot be executed.
        OperatorError: what the child said went wrong, or (reason ``pilot_broken``) an answer that is none.
    """
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    environ = {**os.environ, "PYTHONPATH": code_path()}
    try:
        child = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "backend.pilot",
            verb,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sys.stderr,
            cwd=home,
            env=environ,
            limit=protocol.MAX_BODY,
        )
    except OSError as error:
        raise UsageError(
            f"the interpreter {python} cannot be executed: {error.strerror}",
            fix="set [host] python to the interpreter that has torch and SGLang",
            reason="no_python",
        ) from error
    try:
        out, _ = await child.communicate(protocol.pack(dict(order)))
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        raise
    return _answer(verb, child.returncode, out)


def _answer(verb: str, code: int | None, out: bytes) -> dict[str, Any]:
    """The child's answer; a failing child prints `{"error": …}` in place of it."""
    try:
        answer = json.loads(out)
    except ValueError:
        answer = None
    if code == 0 and isinstance(answer, dict):
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        raise OperatorError.from_json(answer["error"])
    raise OperatorError(
        f"`backend.pilot {verb}` ended with code {code} and without an answer",
        fix="its own words stand above; check that [host] python has the packages of the extra `host`",
        reason="pilot_broken",
        code=Exit(code) if code in tuple(Exit) and code else Exit.STAGE_FAILED,
    )
