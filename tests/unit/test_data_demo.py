"""The demo's data: answers that find their prompts, three sources in three formats, a split large enough to use."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from backend.data.chat import ChatFormat
from backend.data.demo.generate import ANSWERS, Answer, Settings, generate, read_answers
from backend.data.demo.prompts import demo_prompts, folded, prompt_index
from backend.data.demo.sources import CHATTERBOT, CHITCHAT, OWN_ANSWERS, demo_sources, write_sources
from backend.data.demo.target import convert, gguf_file
from backend.data.merge import MergeSettings, merge
from backend.data.merge_report import MergeReport
from backend.data.merged import read_split, verify_merged
from backend.data.sources import Dropped, Source, SourceSpec
from backend.errors import OperatorError
from backend.report import Silent
from backend.resolve import load
from tests.unit.data_support import model_folder, tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


def test_prompts_are_many_varied_and_each_asked_once() -> None:
    prompts = demo_prompts()
    assert len(prompts) >= 340
    assert len({folded(prompt.text) for prompt in prompts}) == len({prompt.id for prompt in prompts}) == len(prompts)
    assert min(Counter(prompt.package for prompt in prompts).values()) >= 50
    assert [prompt.id for prompt in prompts] == sorted(prompt.id for prompt in prompts)


def test_every_answer_finds_its_prompt_in_the_package_it_names() -> None:
    answers, index = read_answers(), prompt_index()
    assert len(answers) >= 300
    assert [index[answer.id].package for answer in answers] == [answer.source for answer in answers]
    assert [answer.id for answer in answers] == sorted({answer.id for answer in answers})
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert all(answer.message.cut == (answer.finish == "length") for answer in answers)


def test_the_repository_holds_answers_and_refers_to_prompts_by_their_id_alone() -> None:
    for line in ANSWERS.read_bytes().splitlines():
        assert set(json.loads(line)) == {"source", "id", "answer", "finish"}


def test_the_three_sources_are_read_in_their_three_formats_without_a_loss(written: Path) -> None:
    expected = {OWN_ANSWERS: ("openai", 300), CHITCHAT: ("sharegpt", 36), CHATTERBOT: ("question-answer", 36)}
    for name, (format_, least) in expected.items():
        source = Source(SourceSpec(name, (str(written / name),)))
        items = list(source)
        assert list(source.formats) == [format_]
        assert not [item for item in items if isinstance(item, Dropped)]
        assert len(items) >= least


def test_writing_the_sources_again_changes_no_byte(written: Path, tmp_path: Path) -> None:
    for path in write_sources(tmp_path):
        assert path.read_bytes() == (written / path.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_no_human_dialogue_contains_a_prompt_that_the_target_answered() -> None:
    """Else a held-out prompt would come back, with a human's answer, as training data."""
    sources = demo_sources()
    asked = {folded(prompt.text) for prompt, _ in sources.own}
    for turns in (*sources.chitchat, *sources.chatterbot):
        assert not asked & {folded(turn) for turn in turns}


@pytest.fixture(scope="module")
def merged(written: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MergeReport]:
    """Merged with the demo profile's own settings; the split depends on prompts alone, not on the tokenizer."""
    data = load(profile="demo", environ={"HOME": "/nowhere"}).config.data
    specs = [
        SourceSpec(
            source.name, tuple(str(written / Path(path).name) for path in source.paths), on_policy=source.on_policy
        )
        for source in data.sources
    ]
    folder = tmp_path_factory.mktemp("merged")
    settings = MergeSettings(
        model=model_folder(tmp_path_factory.mktemp("model")),
        max_tokens=4096,
        heldout_share=data.heldout_share,
        validation_share=data.validation_share,
        seed=data.seed,
    )
    return folder, merge(specs, settings, folder, Silent())


def test_the_demos_split_is_large_enough_to_train_tune_and_judge(merged: tuple[Path, MergeReport]) -> None:
    folder, report = merged
    own = next(source for source in report.sources if source.on_policy)
    records = {split: totals.records for split, totals in own.written.items()}
    assert records["train"] >= 220
    assert records["heldout"] >= 40
    assert report.splits["validation"].totals.records >= 15
    assert [source.dropped for source in report.sources] == [{}, {}, {}]
    assert all(check.ok for check in verify_merged(folder))


def test_an_answer_cut_by_length_trains_no_end_of_turn_in_the_merged_data(merged: tuple[Path, MergeReport]) -> None:
    folder, _ = merged
    cut = {answer.answer: answer.finish == "length" for answer in read_answers()}
    decode, end, seen = tokenizer().decode, tokenizer().eos_token_id, Counter[bool]()
    for record in read_split(folder, "train"):
        if record.source != "own-answers":
            continue
        ((start, stop),) = record.spans
        ended = record.input_ids[stop - 1] == end
        text = decode(record.input_ids[start : stop - ended])
        assert cut[text] != ended
        seen[ended] += 1
    assert min(seen[True], seen[False]) >= 50


def test_an_answer_whose_prompt_is_in_no_package_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = Answer("chitchat", "0" * 32, "hello", "stop")
    monkeypatch.setattr("backend.data.demo.sources.read_answers", lambda: [*read_answers(), stray])
    with pytest.raises(OperatorError, match=f"1 of .* have no prompt.*{stray.id}") as caught:
        demo_sources()
    assert caught.value.reason == "prompt_missing"


def test_a_broken_generation_keeps_its_answers_and_tells_what_to_do(tmp_path: Path) -> None:
    """The server is gone (nothing listens on port 9): what was answered before stays, a torn last line goes."""
    out, first, second = tmp_path / "answers.jsonl", *demo_prompts()[:2]
    journal = tmp_path / "answers.jsonl.journal"
    out.write_text(json.dumps(asdict(Answer(first.package, first.id, "one", "stop"))) + "\n")
    torn = json.dumps(asdict(Answer(second.package, second.id, "two", "stop"))) + "\n" + '{"source": "chi'
    journal.write_text(torn)
    before = out.read_bytes()
    with pytest.raises(OperatorError, match="does not answer") as caught:
        generate("http://127.0.0.1:9", ChatFormat(tokenizer()), out, Settings(concurrency=2))
    assert caught.value.reason == "server_unreachable"
    assert out.read_bytes() == before
    assert journal.read_text() == torn.partition("\n")[0] + "\n"


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": "chitchat"}\n')
    with pytest.raises(OperatorError, match=r"a\.jsonl:1 is not an answer"):
        read_answers(tmp_path / "a.jsonl")
    with pytest.raises(OperatorError, match="demo-data"):
        read_answers(tmp_path / "absent.jsonl")


def test_the_target_is_never_converted_over_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(OperatorError, match="is not a conversion") as caught:
        convert(tmp_path)
    assert caught.value.reason == "foreign_folder"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert gguf_file().stat().st_size > 50_000_000
