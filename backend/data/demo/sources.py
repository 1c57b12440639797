"""The demo's three sources, in three formats.

`python -m backend.data.demo.sources OUT_DIR` writes `own-answers.jsonl` (OpenAI messages: the target's own answers,
on-policy), `chitchat.json` (a ShareGPT array: people talking) and `chatterbot.yml` (questions and answers). A pure
function of the installed packages and `answers.jsonl`. No human dialogue contains a prompt that the target answered,
so a held-out prompt cannot come back as training data. Owns the choice of the human dialogues.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from backend.data.demo.generate import Answer, read_answers
from backend.data.demo.prompts import (
    Prompt,
    chatterbot_subjects,
    chitchat_dialogues,
    folded,
    prompt_index,
    stable_key,
)
from backend.errors import OperatorError

OWN_ANSWERS, CHITCHAT, CHATTERBOT = "own-answers.jsonl", "chitchat.json", "chatterbot.yml"
DIALOGUES = 36
"""Human dialogues in each of the two human sources."""
PER_SUBJECT = 4


@dataclass(frozen=True)
class DemoSources:
    """What stands in the three files, before it is written in their formats."""

    own: tuple[tuple[Prompt, Answer], ...]
    chitchat: tuple[tuple[str, ...], ...]
    chatterbot: tuple[tuple[str, ...], ...]


def demo_sources() -> DemoSources:
    """Join the answers with their prompts and choose the human dialogues.

    Raises:
        OperatorError: a package is missing, or does not hold a prompt that `answers.jsonl` answers.
    """
    index = prompt_index()
    answers = read_answers()
    lost = [answer for answer in answers if answer.id not in index]
    if lost:
        raise OperatorError(
            f"{len(lost)} of {len(answers)} answers have no prompt in the installed packages, the first {lost[0].id} "
            f"of {lost[0].source}",
            fix="install the pinned versions of chatterbot-corpus and chitchat-dataset, or run `make demo-data`",
            reason="prompt_missing",
        )
    own = tuple((index[answer.id], answer) for answer in answers)
    taken = {folded(prompt.text) for prompt, _ in own}
    return DemoSources(own, _chitchat(taken), _chatterbot(taken))


def write_sources(out_dir: Path) -> list[Path]:
    """Write the three files into `out_dir`, each in one piece."""
    made = demo_sources()
    out_dir.mkdir(parents=True, exist_ok=True)
    own = "".join(_own_line(prompt, answer) for prompt, answer in made.own)
    conversations = {"conversations": [list(turns) for turns in made.chatterbot]}
    texts = {
        OWN_ANSWERS: own,
        CHITCHAT: json.dumps([_sharegpt(turns) for turns in made.chitchat], ensure_ascii=False, indent=1) + "\n",
        CHATTERBOT: yaml.safe_dump(conversations, allow_unicode=True, sort_keys=False, width=120),
    }
    for name, text in texts.items():
        _write(out_dir / name, text)
    return [out_dir / name for name in texts]


def _chitchat(taken: set[str]) -> tuple[tuple[str, ...], ...]:
    """Dialogues of 4 to 8 turns that end with an answer."""
    fitting = []
    for dialogue in chitchat_dialogues():
        turns = dialogue.turns[: min(len(dialogue.turns), 8) // 2 * 2]
        if len(turns) >= 4 and all(len(turn) <= 300 and turn.isascii() for turn in turns):
            fitting.append(turns)
    return tuple(islice(_free(fitting, taken), DIALOGUES))


def _chatterbot(taken: set[str]) -> tuple[tuple[str, ...], ...]:
    """Questions with their answers, at most `PER_SUBJECT` of a subject."""
    chosen: list[tuple[str, ...]] = []
    for dialogues in chatterbot_subjects().values():
        even = [turns[: len(turns) // 2 * 2] for turns in dialogues]
        fitting = [turns for turns in even if turns and all(0 < len(turn) <= 400 for turn in turns)]
        chosen += islice(_free(fitting, taken), PER_SUBJECT)
    return tuple(islice(_free(chosen, taken), DIALOGUES))


def _free(dialogues: Iterable[tuple[str, ...]], taken: set[str]) -> Iterator[tuple[str, ...]]:
    """The dialogues in which nobody says what the target was asked, each once, in an order of their own."""
    for turns in sorted(set(dialogues), key=lambda turns: stable_key("\n".join(turns))):
        if not any(folded(turn) in taken for turn in turns):
            yield turns


def _own_line(prompt: Prompt, answer: Answer) -> str:
    turn = {"role": "assistant", "content": answer.answer, "finish_reason": answer.finish}
    return json.dumps({"messages": [{"role": "user", "content": prompt.text}, turn]}, ensure_ascii=False) + "\n"


def _sharegpt(turns: Sequence[str]) -> dict[str, Any]:
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[j % 2], "value": turn} for j, turn in enumerate(turns)]}


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m backend.data.demo.sources", description="Write the demo's sources."
    )
    parser.add_argument("out_dir", type=Path)
    try:
        paths = write_sources(parser.parse_args(argv).out_dir.resolve())
    except OperatorError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.code)
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
