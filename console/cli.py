"""Entry point of `eagle3-console`: words in, exit code out.

Owns dispatch and the last word on errors. Stays light: importing this module loads argparse and nothing heavier; the
module that does the work is imported when it is known which one that is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from backend.errors import Exit, OperatorError
from console import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (`docs/exit-codes.md`)."""
    args = parser.parse(argv)
    if args.auto or args.command == "demo":
        module = "run"
    elif args.command:
        module = parser.COMMANDS[args.command].module
    else:
        print(_hint(), file=sys.stderr)
        return Exit.USAGE
    try:
        return int(importlib.import_module(f"console.commands.{module}").run(args))
    except OperatorError as error:
        _report(error, as_json=args.output in ("json", "jsonl"))
        return int(error.code)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.INTERRUPTED


def _report(error: OperatorError, *, as_json: bool) -> None:
    """The sentence for the operator on stderr; for programs the same as data on stdout."""
    from console import jsonl
    from console.sanitise import clean

    if as_json:
        print(jsonl.own("error", error.as_json()), flush=True)
    what, *more = (clean(line) for line in str(error.what).splitlines() or [""])
    print(f"error: {what}", *(f"  {line}" for line in more), sep="\n", file=sys.stderr)
    for line in error.fix.splitlines():
        print(f"  fix: {clean(line)}", file=sys.stderr)


def _hint() -> str:
    names = "\n".join(f"  {command.name:<9} {command.help}" for command in parser.COMMANDS.values())
    return (
        f"usage: eagle3-console --auto | COMMAND\n\n{parser.DESCRIPTION}\n\n"
        f"  --auto    run the pipeline of your config\n{names}\n\n"
        "New here? `eagle3-console demo`. Everything else: `eagle3-console --help`."
    )


if __name__ == "__main__":
    sys.exit(main())
