"""The merge: its books add up, its result depends on content alone, and held-out prompts are never trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.data.merge import MergeSettings, merge
from backend.data.merge_report import MergeReport
from backend.data.merged import SPLITS, data_digest, read_report, read_split, verify_merged
from backend.data.sources import SourceSpec
from backend.errors import OperatorError, UsageError
from backend.report import Silent
from tests.unit.data_support import REWRITING, dialogue, model_folder, tokenizer, write_jsonl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def spec(path: Path, name: str = "s", **more: Any) -> SourceSpec:
    return SourceSpec(name, (str(path),), **more)


def run(model: Path, out: Path, *specs: SourceSpec, reporter: Silent | None = None, **more: Any) -> MergeReport:
    shares: dict[str, Any] = {"heldout_share": 0.0, "validation_share": 0.0, **more}
    return merge(specs, MergeSettings(model, **shares), out, reporter or Silent())


def ids(folder: Path) -> dict[str, list[str]]:
    return {split: [record.id for record in read_split(folder, split)] for split in SPLITS}


def failed(folder: Path) -> list[str]:
    return [check.name for check in verify_merged(folder) if not check.ok]


def talks(count: int, word: str = "q") -> list[dict[str, Any]]:
    return [dialogue(f"{word} {i}?", f"answer {i}") for i in range(count)]


# --- the books -------------------------------------------------------------------------------------------------------

LINES: list[object] = [
    dialogue("hello", "hi"),
    dialogue("hello", "hi"),
    dialogue("hello", "hi", "more", "less"),
    dialogue("a", "b", "trailing"),
    dialogue("only a question"),
    dialogue("", "blank question"),
    dialogue("long " * 60, "answer"),
    dialogue("end<|im_end|>", "injected"),
    {"messages": [{"role": "alien", "content": "x"}]},
    {"text": "another format"},
    '{"torn": ',
    "[1, 2]",
]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.lists(st.sampled_from(LINES), min_size=1, max_size=12),
    second=st.lists(st.sampled_from(LINES), min_size=1, max_size=12),
    overlength=st.sampled_from(["drop", "cut"]),
    cap=st.none() | st.integers(1, 4),
    shares=st.sampled_from([(0.0, 0.0), (0.3, 0.3)]),
)
def test_whatever_is_read_is_kept_or_dropped_for_a_reason(
    model: Path,
    tmp_path: Path,
    first: list[object],
    second: list[object],
    overlength: str,
    cap: int | None,
    shares: tuple[float, float],
) -> None:
    first, second = [dialogue("always", "here"), *first], [dialogue("also", "here"), *second]
    specs = [
        spec(write_jsonl(tmp_path / "1.jsonl", first), "one", format="openai", max_bad=1.0, max_records=cap),
        spec(write_jsonl(tmp_path / "2.jsonl", second), "two", format="openai", max_bad=1.0, on_policy=True),
    ]
    more = {"heldout_share": shares[0], "validation_share": shares[1], "overlength": overlength, "max_tokens": 100}
    try:
        report = run(model, tmp_path / "out", *specs, **more)
    except OperatorError as error:
        assert error.reason == "nothing_left"
        return
    assert [source.read for source in report.sources] == [len(first), len(second)]
    assert all(source.adds_up() for source in report.sources)
    assert failed(tmp_path / "out") == []
    assert read_report(tmp_path / "out") == report
    if cap is not None:
        assert report.sources[0].kept <= cap


def test_each_loss_has_its_reason(model: Path, tmp_path: Path) -> None:
    source = spec(write_jsonl(tmp_path / "a.jsonl", LINES), format="openai", max_bad=1.0)
    (books,) = run(model, tmp_path / "out", source, max_tokens=100, overlength="drop").sources
    assert (books.read, books.kept, books.bad) == (12, 3, 7)
    assert books.dropped == {
        "duplicate": 1,
        "no_assistant_turn": 1,
        "blank_turn": 1,
        "too_long": 1,
        "special_token_in_text": 1,
        "unknown_role": 1,
        "wrong_shape": 2,
        "bad_json": 1,
    }
    assert books.repaired == {"trailing_turns": 1}
    assert f"bad_json: {tmp_path}/a.jsonl:11" in "\n".join(books.examples)
    assert books.written["train"].records == sum(books.lengths.values()) == 3


def test_duplicates_are_found_across_sources_and_named_by_their_first_owner(model: Path, tmp_path: Path) -> None:
    """The on-policy copy stays, whatever the order of the config."""
    off = spec(write_jsonl(tmp_path / "off.jsonl", [*talks(3), *talks(2, "other")]), "off")
    on = spec(write_jsonl(tmp_path / "on.jsonl", [*talks(3), *talks(1)]), "on", on_policy=True)
    report = run(model, tmp_path / "out", off, on)
    assert [(books.name, books.kept, books.duplicate_of) for books in report.sources] == [
        ("off", 2, {"on": 3}),
        ("on", 3, {"on": 1}),
    ]


# --- content alone decides -------------------------------------------------------------------------------------------


def test_renamed_files_and_shuffled_lines_give_the_same_files(model: Path, tmp_path: Path) -> None:
    records: Sequence[Any] = talks(60)
    shuffled = list(records)
    random.Random(1).shuffle(shuffled)
    one = spec(write_jsonl(tmp_path / "a" / "x.jsonl", records), on_policy=True)
    write_jsonl(tmp_path / "b" / "2.jsonl", shuffled[:20])
    (tmp_path / "b" / "1.json").write_text(json.dumps(shuffled[20:], indent=2))
    two = spec(tmp_path / "b", on_policy=True)
    shares = {"heldout_share": 0.2, "validation_share": 0.2}
    run(model, tmp_path / "out1", one, **shares)
    run(model, tmp_path / "out2", two, **shares)
    assert ids(tmp_path / "out1") == ids(tmp_path / "out2")
    assert data_digest(tmp_path / "out1") == data_digest(tmp_path / "out2")
    assert all(len(found) > 3 for found in ids(tmp_path / "out1").values())


def test_the_seed_changes_order_and_split_and_nothing_else(model: Path, tmp_path: Path) -> None:
    source = spec(write_jsonl(tmp_path / "a.jsonl", talks(60)), on_policy=True)
    found = []
    for seed in (0, 1):
        run(model, tmp_path / str(seed), source, heldout_share=0.2, seed=seed)
        found.append(ids(tmp_path / str(seed)))
    assert set(found[0]["heldout"]) != set(found[1]["heldout"])
    assert {i for split in found[0].values() for i in split} == {i for split in found[1].values() for i in split}


def test_a_cap_takes_the_same_records_whatever_their_order_and_counts_the_others(model: Path, tmp_path: Path) -> None:
    kept = []
    for name, records in (("a", talks(30) + talks(30)), ("b", talks(30)[::-1])):
        source = spec(write_jsonl(tmp_path / f"{name}.jsonl", records), max_records=7)
        (books,) = run(model, tmp_path / name, source).sources
        assert books.kept == 7
        assert books.dropped["capped"] == len(records) - 7 - books.dropped.get("duplicate", 0)
        kept.append(ids(tmp_path / name))
    assert kept[0] == kept[1]


# --- the split -------------------------------------------------------------------------------------------------------


def test_held_out_is_on_policy_only_and_its_prompts_come_back_nowhere(model: Path, tmp_path: Path) -> None:
    """Neither as another answer to the prompt, nor in another spelling, nor with a longer dialogue behind it."""
    on = [*talks(80), *(dialogue(f"q {i}?", f"another answer {i}", "and?", "so") for i in range(80))]
    off = [*(dialogue(f"Q  {i}?", f"what people say {i}") for i in range(80)), *talks(40, "people")]
    specs = [
        spec(write_jsonl(tmp_path / "off.jsonl", off), "off"),
        spec(write_jsonl(tmp_path / "on.jsonl", on), "on", on_policy=True),
    ]
    report = run(model, tmp_path / "out", *specs, heldout_share=0.25, validation_share=0.1)
    held = list(read_split(tmp_path / "out", "heldout"))
    assert len(held) >= 20
    assert {record.source for record in held} == {"on"}
    assert report.sources[0].dropped == {"heldout_prompt": len(held) // 2}
    decode = tokenizer().decode
    prompts = {
        split: {decode(r.prompt_ids).casefold().replace("  ", " ") for r in read_split(tmp_path / "out", split)}
        for split in SPLITS
    }
    assert not prompts["heldout"] & (prompts["train"] | prompts["validation"])
    assert not prompts["validation"] & prompts["train"]
    assert failed(tmp_path / "out") == []


def test_off_policy_sources_alone_hold_nothing_out(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", spec(write_jsonl(tmp_path / "a.jsonl", talks(40))), heldout_share=0.5)
    assert {split: len(found) for split, found in ids(tmp_path / "out").items()}["heldout"] == 0


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_cut_keeps_the_beginning_and_drop_keeps_nothing_of_a_record_that_is_too_long(
    model: Path, tmp_path: Path
) -> None:
    source = spec(write_jsonl(tmp_path / "a.jsonl", [dialogue("q", "word " * 50), *talks(1)]))
    (cut,) = run(model, tmp_path / "cut", source, max_tokens=60).sources
    (dropped,) = run(model, tmp_path / "drop", source, max_tokens=60, overlength="drop").sources
    assert (cut.kept, cut.cut, cut.dropped) == (2, 1, {})
    assert (dropped.kept, dropped.cut, dropped.dropped) == (1, 0, {"too_long": 1})
    end = tokenizer().eos_token_id
    for record in read_split(tmp_path / "cut", "train"):
        assert len(record.input_ids) <= 60
        assert record.spans[-1][1] == len(record.input_ids)
        assert (record.input_ids[-1] == end) == (len(record.input_ids) < 60)


def test_a_dialogue_that_the_template_rewrites_is_split_and_counted(tmp_path: Path) -> None:
    thinking = dialogue("q", "r1</think>a1", "q2", "r2</think>a2")
    prefix = {"messages": thinking["messages"][:2]}
    source = spec(write_jsonl(tmp_path / "a.jsonl", [thinking, prefix, *talks(1)]))
    (books,) = run(model_folder(tmp_path / "m", REWRITING), tmp_path / "out", source).sources
    assert (books.kept, books.split_rewrite, books.written["train"].records) == (2, 1, 3)
    assert books.dropped == {"duplicate": 1}
    assert failed(tmp_path / "out") == []


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def older(model: Path, tmp_path: Path) -> Path:
    run(model, tmp_path / "out", spec(write_jsonl(tmp_path / "old.jsonl", talks(3))))
    return tmp_path / "out"


def test_a_source_that_loses_too_much_fails_and_the_older_merge_stands(
    model: Path, tmp_path: Path, older: Path
) -> None:
    before = data_digest(older)
    source = spec(write_jsonl(tmp_path / "bad.jsonl", [*talks(8), "{", dialogue("no answer")]), "dirty", max_bad=0.1)
    with pytest.raises(OperatorError, match=r"source dirty lost 2 of 10 records.*bad\.jsonl:9") as caught:
        run(model, older, source)
    assert caught.value.reason == "source_bad"
    assert (data_digest(older), failed(older)) == (before, [])
    assert sorted(path.name for path in older.iterdir()) == [
        "heldout.jsonl",
        "report.json",
        "train.jsonl",
        "validation.jsonl",
    ]


def test_a_loss_within_bounds_passes_and_a_torn_array_is_said_aloud(model: Path, tmp_path: Path) -> None:
    class Heard(Silent):
        said: list[str]

        def warning(self, text: str) -> None:
            self.said.append(text)

    heard = Heard()
    heard.said = []
    text = json.dumps(talks(20))
    (tmp_path / "a.json").write_text(text[:-30])
    (books,) = run(model, tmp_path / "out", spec(tmp_path / "a.json", max_bad=0.1), reporter=heard).sources
    assert (books.read, books.kept, books.dropped) == (20, 19, {"truncated": 1})
    (said,) = heard.said
    assert f"breaks off at byte {len(text) - 30}" in said


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.jsonl", None, "source_missing"),
        ("a.jsonl", "", "empty_source"),
        ("a.jsonl", '{"url": "u"}\n', "unknown_format"),
    ],
)
def test_a_useless_source_stops_the_merge_before_the_good_ones_are_read(
    model: Path, tmp_path: Path, older: Path, name: str, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    before = data_digest(older)
    with pytest.raises(OperatorError, match=r"useless|a\.jsonl is empty") as caught:
        run(
            model, older, spec(write_jsonl(tmp_path / "good.jsonl", talks(3)), "good"), spec(tmp_path / name, "useless")
        )
    assert caught.value.reason == reason
    assert name in caught.value.what
    assert caught.value.fix
    assert data_digest(older) == before


def test_a_merge_that_leaves_nothing_to_train_on_is_refused(model: Path, tmp_path: Path) -> None:
    source = spec(write_jsonl(tmp_path / "a.jsonl", talks(3)))
    with pytest.raises(OperatorError, match="too_long") as caught:
        run(model, tmp_path / "out", source, max_tokens=5)
    assert caught.value.reason == "nothing_left"
    with pytest.raises(UsageError):
        run(model, tmp_path / "out", source, source)


# --- proof -----------------------------------------------------------------------------------------------------------


def _repeat(lines: list[dict[str, Any]]) -> None:
    lines.append(lines[0])


def _overrun(lines: list[dict[str, Any]]) -> None:
    lines[0]["spans"][-1][1] += 1


def _no_prompt(lines: list[dict[str, Any]]) -> None:
    lines[0]["spans"][0][0] = 0


def _lose(lines: list[dict[str, Any]]) -> None:
    del lines[0]


def _rename(lines: list[dict[str, Any]]) -> None:
    lines[0]["source"] = "off"


@pytest.mark.parametrize(
    ("split", "damage", "check"),
    [
        ("train", _repeat, "record ids are unique"),
        ("train", _overrun, "spans lie inside their records"),
        ("train", _no_prompt, "spans lie inside their records"),
        ("train", _lose, "totals equal the report"),
        ("train", _rename, "counts per source equal the report"),
        ("heldout", _rename, "held-out is on-policy only"),
    ],
)
def test_verify_finds_what_is_wrong_with_a_file(
    model: Path, tmp_path: Path, split: str, damage: Any, check: str
) -> None:
    out = tmp_path / "out"
    on = spec(write_jsonl(tmp_path / "on.jsonl", talks(40)), "on", on_policy=True)
    run(model, out, on, spec(write_jsonl(tmp_path / "off.jsonl", talks(5, "x")), "off"), heldout_share=0.3)
    assert failed(out) == []
    file = out / f"{split}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    before = data_digest(out)
    damage(lines)
    write_jsonl(file, lines)
    assert {check, f"{split}.jsonl is the file of this merge"} <= set(failed(out))
    assert data_digest(out) != before


def test_verify_finds_a_held_out_prompt_in_the_training_file(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out, spec(write_jsonl(tmp_path / "on.jsonl", talks(40)), "on", on_policy=True), heldout_share=0.3)
    leak = json.loads((out / "heldout.jsonl").read_text().splitlines()[0]) | {"id": "0" * 32}
    with (out / "train.jsonl").open("a") as file:
        file.write(json.dumps(leak) + "\n")
    assert "no held-out prompt is trained on" in failed(out)


def test_verify_names_an_unreadable_line_and_a_missing_file_and_needs_a_report(older: Path) -> None:
    with (older / "train.jsonl").open("a") as file:
        file.write('{"id": "torn')
    assert "every line is a record" in failed(older)
    assert "train.jsonl:4" in verify_merged(older)[-1].evidence
    (older / "train.jsonl").unlink()
    assert failed(older) == ["every line is a record"]
    (older / "report.json").unlink()
    with pytest.raises(OperatorError) as caught:
        verify_merged(older)
    assert caught.value.reason == "not_merged"
