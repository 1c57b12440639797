"""The format: identity and manifest survive the trip through JSON, a record is a safetensors file, sizes are exact."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from backend.errors import OperatorError, UsageError
from backend.store.format import (
    PAGE,
    SCHEMES,
    Entry,
    Manifest,
    Seal,
    SealedShard,
    StoreIdentity,
    bytes_per_token,
    parse_header,
)
from backend.store.reader import Store
from backend.store.record import dequantise, encode, quantise
from tests.unit.store_support import build, identity, sample

OTHER: dict[str, Any] = {
    "layers": (2, 3, 6),
    "post_norm": False,
    "hidden_size": 16,
    "max_tokens": 9,
    "scheme": "float32",
}


def encoded(who: StoreIdentity, number: int = 1) -> bytes:
    one = sample(number, who)
    return b"".join(encode(who, one.id, one.source, one.input_ids_T, one.spans, one.aux_TC, one.last_TH).parts)


@pytest.mark.parametrize(("scheme", "kimi"), [("bf16", 57344), ("float32", 114688), ("aux8", 35852)])
def test_bytes_per_token_is_what_the_disk_budget_of_kimi_needs(scheme: str, kimi: int) -> None:
    assert bytes_per_token(scheme, 7168, 3) == kimi
    assert identity(scheme=scheme, hidden_size=7168).bytes_per_token == kimi


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_per_token_is_what_a_record_takes_beside_ids_header_and_padding(scheme: str) -> None:
    who = identity(scheme=scheme, hidden_size=64)
    one = sample(3, who, tokens=500)
    size = encode(who, one.id, one.source, one.input_ids_T, one.spans, one.aux_TC, one.last_TH).nbytes
    assert size % PAGE == 0
    assert 0 <= size - 500 * (who.bytes_per_token + 4) < 3 * PAGE


@pytest.mark.parametrize("field", [field.name for field in fields(StoreIdentity)])
def test_every_field_of_the_identity_changes_its_sha_and_is_named(field: str) -> None:
    one = identity()
    other = replace(one, **{field: OTHER.get(field, "other")})
    assert other.sha() != one.sha()
    assert other.first_difference(one).startswith(f"{field}: ")
    assert StoreIdentity.from_json(json.loads(json.dumps(other.as_json()))) == other


@pytest.mark.parametrize("changes", [{"layers": (3, 2)}, {"layers": ()}, {"scheme": "int8"}, {"hidden_size": 6}])
def test_an_identity_that_no_store_can_have_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        identity(**changes)


def test_the_manifest_survives_the_trip_through_json_and_names_what_is_wrong() -> None:
    seal = Seal(1, 2, 4096, "0" * 32, (SealedShard("shard-000000.hs", 1, 4096, "1" * 32),))
    manifest = replace(Manifest(identity(), "run").with_session("run", None, 0), seal=seal)
    data = json.loads(json.dumps(manifest.as_json()))
    assert Manifest.from_json(data, "here") == manifest
    changes: list[dict[str, Any]] = [{"version": 2}, {"identity_sha": "0"}, {"identity": {}}, {"seal": 3}]
    for change in [*changes, {"sessions": [{}]}]:
        with pytest.raises(OperatorError, match="here"):
            Manifest.from_json({**data, **change}, "here")
    longer = {**data["identity"], "hidden_size": "8"}
    with pytest.raises(OperatorError, match="hidden_size"):
        Manifest.from_json({**data, "identity": longer}, "here")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_record_is_a_complete_safetensors_file_for_any_other_program(scheme: str) -> None:
    who = identity(scheme=scheme)
    data = encoded(who)
    tensors = safetensors.torch.load(data)
    assert torch.equal(tensors["input_ids"].long(), sample(1, who).input_ids_T)
    assert torch.equal(tensors["hidden_state"], sample(1, who).last_TH)
    assert tensors["aux_hidden_state"].shape == (10, who.width)
    assert parse_header(data).nbytes == len(data)
    assert parse_header(data).tensors["aux_hidden_state"].start % PAGE == 0


def test_the_shards_and_the_journal_can_be_read_with_json_and_safetensors_alone(tmp_path: Path) -> None:
    samples = build(tmp_path / "s", 5)
    lines = (tmp_path / "s/journal.jsonl").read_text().splitlines()
    for line, one in zip(map(json.loads, lines), samples, strict=True):
        data = (tmp_path / f"s/shard-{line['shard']:06d}.hs").read_bytes()
        tensors = safetensors.torch.load(data[line["offset"] : line["offset"] + line["nbytes"]])
        assert line["id"] == one.id
        assert torch.equal(tensors["aux_hidden_state"], one.aux_TC)


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[1]",
        b'"x"',
        b"\xff",
        Entry("A" * 32, "s", 0, 0, 4096, 1, "0" * 32).line(),
        Entry("a" * 32, "s", 0, 1, 4096, 1, "0" * 32).line(),
        Entry("a" * 32, "s", -1, 0, 4096, 1, "0" * 32).line(),
        Entry("a" * 32, "s", 0, 0, 4096, True, "0" * 32).line(),
    ],
)
def test_a_journal_line_that_was_never_written_like_this_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"keys|JSON|count|digits|decode|column"):
        Entry.parse(line)


def test_aux8_keeps_every_value_within_a_sixteenth_even_beside_massive_channels() -> None:
    draw = torch.Generator().manual_seed(0)
    rows_TC = torch.randn(64, 3 * 256, generator=draw)
    rows_TC[:, 5::256] *= 300
    rows_TC[3] = 0
    given_TC = rows_TC.bfloat16()
    stored_TC, scale_TL = quantise(given_TC, 3)
    back_TC = dequantise(stored_TC, scale_TL)
    assert (stored_TC.dtype, scale_TL.shape, back_TC.dtype) == (torch.float8_e4m3fn, (64, 3), torch.bfloat16)
    error_TC = (back_TC.float() - given_TC.float()).abs()
    step_TC = (scale_TL * 2**-10).repeat_interleave(256, dim=1)
    # 2^-4 of e4m3's rounding, and bf16's own 2^-9 when the product is rounded back.
    assert bool((error_TC <= given_TC.float().abs() * (2**-4 + 2**-8) + step_TC * 1.01).all())
    # The control: one scale over the whole row of three layers at int8's step loses the small channels.
    ordinary = given_TC[:3].float()
    assert float(error_TC[:3].norm() / ordinary.norm()) < 0.03
    assert bool((back_TC[3] == 0).all())


def test_aux8_comes_back_through_the_store_with_the_last_hidden_state_exact(tmp_path: Path) -> None:
    who = identity(scheme="aux8", hidden_size=64)
    samples = build(tmp_path / "s", 6, who)
    with Store.open(tmp_path / "s") as store:
        for one in samples:
            got = store.record(one.id)
            assert torch.equal(got.last_TH, one.last_TH)
            relative = (got.aux_TC.float() - one.aux_TC.float()).norm() / one.aux_TC.float().norm()
            assert 0 < float(relative) < 0.04
            assert store.raw(one.id)["aux_scale"].shape == (len(one.input_ids_T), 3)
