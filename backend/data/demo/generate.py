"""The target's own answers to the demo's prompts, through a running SGLang server.

Writes `answers.jsonl`, one line per answer: `{"source", "id", "answer", "finish"}`. `id` is the content id of the
prompt; the prompt's text stays in its package. `finish` is "stop", or "length" for an answer that met the token limit
and so has no end of turn. Owns that file's format (writer and reader) and the journal that makes a broken run
resumable; starts and stops no server.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backend.data.chat import ChatFormat
from backend.data.demo.prompts import Package, Prompt, demo_prompts
from backend.data.records import Message, Record, Unusable
from backend.engine.client import AsyncSGLangClient, Reply
from backend.errors import OperatorError
from backend.report import Reporter, Silent

ANSWERS = Path(__file__).parent / "answers.jsonl"
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """One answer of the target; `id` is its prompt's content id."""

    source: Package
    id: str
    answer: str
    finish: Finish

    @property
    def message(self) -> Message:
        """The answer as an assistant turn."""
        return Message("assistant", self.answer, cut=self.finish == "length")


@dataclass(frozen=True)
class Settings:
    """Greedy decoding, `concurrency` requests in flight, at most `max_new_tokens` an answer."""

    max_new_tokens: int = 96
    concurrency: int = 32


def read_answers(path: Path = ANSWERS) -> list[Answer]:
    """The answers in `path`.

    Raises:
        OperatorError: the file is missing, or a line is not an answer.
    """
    try:
        lines = path.read_bytes().split(b"\n")  # not `splitlines`: an answer may hold other characters that end a line
    except FileNotFoundError as error:
        raise OperatorError(f"{path} is missing", fix="`make demo-data` writes it", reason="answers_missing") from error
    answers = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise OperatorError(
                f"{path}:{number} is not an answer: {error}", fix="`make demo-data` makes it again", reason="damaged"
            ) from error
    return answers


def generate(
    server: str,
    chat: ChatFormat,
    out: Path = ANSWERS,
    settings: Settings | None = None,
    reporter: Reporter | None = None,
) -> Counter[str]:
    """Answer every demo prompt that neither `out` nor its journal answers yet, then write `out` in one piece.

    Answers whose text does not tokenise back to the ids that the target produced are left out: trained on, they would
    not be its own. Returns counts: ``stop``, ``length``, ``not_reproducible``, ``kept`` (from before).

    Raises:
        OperatorError: the server cannot be reached or refuses a request; what is answered stays in the journal.
    """
    settings = settings or Settings()
    prompts = {prompt.id: prompt for prompt in demo_prompts()}
    journal = out.with_name(out.name + ".journal")
    known = {answer.id: answer for answer in _resume(out, journal) if answer.id in prompts}
    counts: Counter[str] = Counter(kept=len(known))
    missing = [prompt for key, prompt in prompts.items() if key not in known]
    with journal.open("a", encoding="utf-8") as file:
        for answer in asyncio.run(_answer_all(server, chat, missing, settings, file, counts, reporter or Silent())):
            known[answer.id] = answer
    partial = out.with_name(f"{out.name}.tmp.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(_line(known[key]) for key in sorted(known))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(out)
    journal.unlink()
    return counts


async def _answer_all(
    server: str,
    chat: ChatFormat,
    prompts: Sequence[Prompt],
    settings: Settings,
    journal: Any,
    counts: Counter[str],
    reporter: Reporter,
) -> list[Answer]:
    gate = asyncio.Semaphore(settings.concurrency)
    answers: list[Answer] = []

    async def one(client: AsyncSGLangClient, prompt: Prompt) -> None:
        prompt_ids = chat.prompt_ids(prompt.messages)
        async with gate:
            reply = await client.generate(prompt_ids, max_new_tokens=settings.max_new_tokens)
        answer = _answer(chat, prompt, prompt_ids, reply)
        if answer is None:
            counts["not_reproducible"] += 1
        else:
            counts[answer.finish] += 1
            answers.append(answer)
            journal.write(_line(answer))
            journal.flush()
        reporter.progress(len(answers) + counts["not_reproducible"], len(prompts), "answers")

    failure: OperatorError | None = None
    try:
        async with AsyncSGLangClient(server) as client, asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(client, prompt))
    except* OperatorError as failed:
        failure = next(error for error in failed.exceptions if isinstance(error, OperatorError))
    if failure is not None:
        raise failure
    return answers


def _answer(chat: ChatFormat, prompt: Prompt, prompt_ids: tuple[int, ...], reply: Reply) -> Answer | None:
    """The reply as an answer; None where its text does not tokenise back to the same ids."""
    if reply.finish_reason not in ("stop", "length"):
        raise OperatorError(
            f"the server ended the answer to prompt {prompt.id} with {reply.finish_reason!r}", reason="server_failed"
        )
    output, end = reply.output_ids, chat.closing_ids[:1]
    # SGLang looks at the length first: an end of turn on the last token allowed is reported as "length".
    finish: Finish = "stop" if reply.finish_reason == "stop" or output[-1:] == end else "length"
    if output[-1:] == end:
        output = output[:-1]
    text = chat.tokenizer.decode(output, clean_up_tokenization_spaces=False)
    answer = Answer(prompt.package, prompt.id, text, finish)
    if not text.strip():
        return None
    try:
        again = chat.tokenise(Record((*prompt.messages, answer.message)))[0]
    except Unusable:
        return None
    produced = prompt_ids + output + (end if finish == "stop" else ())
    return answer if again.input_ids[: again.spans[-1][1]] == produced else None


def _resume(out: Path, journal: Path) -> Iterator[Answer]:
    """Answers of an earlier finished or broken run. A torn last line of the journal is cut off."""
    if out.exists():
        yield from read_answers(out)
    if journal.exists():
        whole = journal.read_bytes()
        os.truncate(journal, whole.rfind(b"\n") + 1)
        yield from read_answers(journal)


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"
