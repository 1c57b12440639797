"""The command line: its grammar, its help, and the registry of commands. Parses words, does nothing.

Imports argparse alone, so that `--help` and a mistyped flag answer at once. Each command names the module that carries
it out; `console.cli` imports that module only when it is asked for.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXIT_CODES = """\
exit codes:
  0  done                                6  preflight failed
  1  a stage failed                      7  the server never became ready
  2  wrong command line or config        8  needs a human (stale, unknown, unkillable)
  3  connection lost, work goes on     124  --timeout, work goes on
  4  confirmation needed or refused    130  interrupted, work goes on
  5  another operator has control      143  terminated, work goes on
stdout is data, stderr is narration; docs/exit-codes.md says more."""

DESCRIPTION = (
    "Make an EAGLE-3 drafter for a model served by SGLang: plan, run, watch and stop the pipeline on its host."
)

EXAMPLES = """\
examples:
  eagle3-console demo                              the whole pipeline on this machine, no GPU needed
  eagle3-console init --profile kimi-k2.5          write a commented eagle3.toml
  eagle3-console plan                              what --auto would do, with numbers; changes nothing
  eagle3-console --auto --yes --allow stop         run it, and agree to stopping the old server
  eagle3-console --auto --from extract --to train  part of it
  eagle3-console attach                            follow the newest pipeline again
"""

DEFAULTS: dict[str, Any] = {
    "command": None,
    "auto": False,
    "config": None,
    "profile": None,
    "host": None,
    "from_stage": None,
    "to_stage": None,
    "only": None,
    "output": "text",
    "yes": False,
    "allow": [],
    "dry_run": False,
    "plan_file": None,
    "timeout": None,
    "no_input": False,
    "detach": False,
    "stop_on_interrupt": False,
}

_RUN_FLAGS = frozenset(DEFAULTS) - {"command", "auto", "config", "profile", "host", "output", "no_input"}
_ALSO_IN = {
    "plan": ("from_stage", "to_stage", "only"),
    "stop": ("yes", "allow"),
    "attach": ("timeout", "stop_on_interrupt"),
}


@dataclass(frozen=True)
class Command:
    """One subcommand: its words, the module with its `run(args) -> int`, and its own arguments."""

    name: str
    help: str
    module: str
    configure: Callable[[argparse.ArgumentParser], None]
    examples: str = ""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace with every key of `DEFAULTS`. Exits with 2 and the reason if it is wrong."""
    parser = build()
    args = parser.parse_args(argv, argparse.Namespace(**{**DEFAULTS, "allow": []}))
    if args.auto and args.command:
        parser.error(f"--auto runs the pipeline; it does not go with the command {args.command!r}")
    if args.only and (args.from_stage or args.to_stage):
        parser.error("--only is one stage alone; it does not go with --from or --to")
    if args.auto or args.command == "demo":
        return args
    given = sorted(name for name in _RUN_FLAGS if getattr(args, name) != DEFAULTS[name])
    if stray := [name for name in given if name not in _ALSO_IN.get(args.command or "", ())]:
        flag = {"from_stage": "--from", "to_stage": "--to", "plan_file": "--plan"}.get(stray[0])
        parser.error(f"{flag or '--' + stray[0].replace('_', '-')} goes with --auto (or demo)")
    return args


def build() -> argparse.ArgumentParser:
    """The whole grammar."""
    parser = argparse.ArgumentParser(
        prog="eagle3-console",
        description=DESCRIPTION,
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    _site_flags(parser)
    headless = parser.add_argument_group("run the pipeline headless")
    headless.add_argument("--auto", action="store_true", help="plan, show, start and follow; the work is detached")
    _selection_flags(headless)
    _run_flags(headless)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for command in COMMANDS.values():
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog=command.examples + EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        command.configure(sub)
    return parser


def duration(text: str) -> float:
    """Seconds from `90`, `90s`, `15m`, `2h` or `1h30m`."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text)
    if not text or match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 90, 90s, 15m, 2h or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        raise argparse.ArgumentTypeError("the duration must be more than nothing")
    return total


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _site_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which config, which host")
    group.add_argument("--config", metavar="FILE", help="the TOML config (default: $EAGLE3_CONFIG, ./eagle3.toml, …)")
    group.add_argument("--profile", metavar="NAME", help="a built-in config instead: demo, kimi-k2.5")
    group.add_argument("--host", metavar="HOST", help="where to run; `local` is this machine")


def _selection_flags(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument("--from", dest="from_stage", metavar="STAGE", help="begin with this stage")
    group.add_argument("--to", dest="to_stage", metavar="STAGE", help="end with this stage")
    group.add_argument("--only", metavar="STAGE", help="this stage alone")


def _run_flags(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    _output_flag(group)
    group.add_argument("--yes", action="store_true", help="agree to reversible steps (severity 1), to nothing else")
    group.add_argument(
        "--allow",
        action="append",
        metavar="NAME[=VALUE]",
        help="agree to one costly step (`stop`), or to one deletion by its plan's hash (`purge=SHA`); repeatable",
    )
    group.add_argument("--dry-run", action="store_true", help="print the plan and what it needs, then end")
    group.add_argument(
        "--plan", dest="plan_file", metavar="FILE", help="run a plan saved with `plan --output json`; refuses if stale"
    )
    group.add_argument("--no-input", action="store_true", help="never ask; exit 4 where consent is missing")
    group.add_argument("--detach", action="store_true", help="return as soon as the host has accepted the work")
    _follow_flags(group)


def _output_flag(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument(
        "--output",
        choices=("text", "jsonl", "quiet"),
        help="text for people (default), jsonl for programs (docs/schema/events-v1.json), quiet: errors only",
    )


def _follow_flags(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    group.add_argument("--timeout", type=duration, metavar="D", help="stop following after 90s, 15m, 2h; exit 124")
    group.add_argument("--stop-on-interrupt", action="store_true", help="Ctrl-C stops the work, not only the view")


def _demo(parser: argparse.ArgumentParser) -> None:
    _selection_flags(parser)
    _run_flags(parser)


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default="kimi-k2.5", metavar="NAME", help="kimi-k2.5 (default) or demo")
    parser.add_argument("path", nargs="?", default="eagle3.toml", help="the file to write (default: eagle3.toml)")
    parser.add_argument(
        "--allow-store",
        action="store_true",
        default=False,
        help="write nothing; agree, in typed words, that older stores under PATH's [store] root may be purged",
    )


def _plan(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    _selection_flags(parser)
    parser.add_argument("stage", nargs="?", default=None, choices=("purge",), help="only what would be deleted")
    parser.add_argument("--output", choices=("text", "json"), help="json: the saved plan that --plan reads")


def _status(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("--output", choices=("text", "json"), help="json: the agent's snapshot")
    parser.add_argument("--watch", action="store_true", default=False, help="again every 2 s, until Ctrl-C")
    parser.add_argument("--idle", action="store_true", default=False, help="exit 4 while anything runs")
    parser.add_argument("--all", action="store_true", default=False, help="every pipeline, not only the newest ten")


def _logs(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("stage", nargs="?", default=None, metavar="STAGE", help="default: the stage at work")
    parser.add_argument("-f", "--follow", action="store_true", default=False, help="until the stage ends")
    parser.add_argument("--tail", type=_positive, default=None, metavar="N", help="only the last N lines")
    parser.add_argument("--attempt", type=_positive, default=None, metavar="N", help="an earlier attempt")
    parser.add_argument("--pipeline", default=None, metavar="ID", help="default: the newest")


def _attach(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("pipeline", nargs="?", default=None, metavar="PIPELINE", help="default: the newest")
    _output_flag(parser)
    _follow_flags(parser)


def _stop(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("stage", nargs="?", default=None, metavar="STAGE", help="default: the pipeline's work")
    parser.add_argument("--pipeline", default=None, metavar="ID", help="default: the newest")
    parser.add_argument("--services", action="store_true", default=False, help="its servers too (needs --allow stop)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--allow", action="append", metavar="stop", help="agree to stopping a server")
    parser.add_argument("--no-input", action="store_true", help="never ask; exit 4 where consent is missing")


def _undo(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("sha", metavar="SHA", help="of the purge, as its stage and the plan print it")


def _explain(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("stage", metavar="STAGE")
    parser.add_argument("--output", choices=("text", "json"), help="json: with every input that the decision rests on")


def _config(parser: argparse.ArgumentParser) -> None:
    _site_flags(parser)
    parser.add_argument("what", choices=("show",), help="show: every value and where it came from")
    parser.add_argument("--output", choices=("text", "json"))


COMMANDS = {
    command.name: command
    for command in (
        Command("demo", "run the small pipeline on this machine, everything real, no GPU", "run", _demo),
        Command("init", "write a commented config; never overwrites", "init", _init),
        Command(
            "plan",
            "print what --auto would do, and why, with numbers; changes nothing",
            "plan",
            _plan,
            "examples:\n"
            "  eagle3-console plan --output json > plan.json && eagle3-console --auto --plan plan.json --yes\n"
            "  eagle3-console plan purge            what would be deleted, and the flag that agrees to it\n\n",
        ),
        Command("status", "show the pipelines on the host and the state of their stages", "status", _status),
        Command(
            "logs",
            "print a stage's log",
            "logs",
            _logs,
            "examples:\n  eagle3-console logs -f\n  eagle3-console logs launch --tail 100\n\n",
        ),
        Command("attach", "follow a pipeline; its own exit code becomes ours", "attach", _attach),
        Command("stop", "stop the pipeline's work, or one stage; servers only if asked to", "stop", _stop),
        Command("undo", "take a purge back, within 15 minutes of it", "undo", _undo),
        Command("explain", "say why a stage would run or be skipped", "explain", _explain),
        Command("config", "show the resolved config", "config", _config),
    )
}
