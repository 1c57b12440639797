"""One record between tensors and bytes: validation, the schemes, the checksum.

Owns what a record must be to be stored at all (rows == token ids, finite, the capture's dtype, turns in order) and the
arithmetic of `aux8`. Reads and writes buffers, never files.

Legend: T tokens, C captured width (n layers x H), L captured layers, H hidden size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from backend.errors import OperatorError
from backend.store.format import (
    AUX,
    DIGEST_AT,
    IDS,
    LAST,
    NO_DIGEST,
    PAD,
    SCALE,
    SPANS,
    Entry,
    Header,
    StoreIdentity,
    TensorSlot,
    build_header,
    header_length,
    is_digest,
    parse_header,
    record_tensors,
    scheme_of,
)

Buffer = bytes | mmap.mmap
Span = tuple[int, int]

TORCH_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "U8": torch.uint8,
}
FP8_MAX = 448.0
"""Largest finite value of e4m3."""
MAX_SOURCE = 200


@dataclass(frozen=True)
class Encoded:
    """A record as it goes to disk: `parts` are its bytes in order, views of the caller's tensors where possible."""

    parts: tuple[memoryview, ...]
    xxh3: str

    @property
    def nbytes(self) -> int:
        """Size on disk: whole pages."""
        return sum(len(part) for part in self.parts)


def encode(
    identity: StoreIdentity,
    record_id: str,
    source: str,
    input_ids_T: torch.Tensor,
    spans: Sequence[Sequence[int]],
    aux_TC: torch.Tensor,
    last_TH: torch.Tensor,
) -> Encoded:
    """Validate one captured record and lay it out.

    Raises:
        OperatorError: reasons `record_id`, `record_source`, `record_tokens`, `record_rows`, `record_dtype`,
            `record_spans`, `record_not_finite`; the record is named, nothing was written.
    """
    _check_name(record_id, source)
    _check_tokens(identity, record_id, input_ids_T, spans)
    _check_states(identity, record_id, len(input_ids_T), aux_TC, last_TH)
    tensors = {
        LAST: last_TH,
        IDS: input_ids_T.to(torch.int32),
        SPANS: torch.tensor([list(span) for span in spans], dtype=torch.int32).reshape(-1, 2),
    }
    if scheme_of(identity.scheme).scaled:
        tensors[AUX], tensors[SCALE] = quantise(aux_TC, len(identity.layers))
    else:
        tensors[AUX] = aux_TC
    layout = record_tensors(identity, len(input_ids_T), len(spans))
    tensors[PAD] = torch.zeros(layout[PAD][1], dtype=torch.uint8)
    header = bytearray(build_header(identity, record_id, source, len(input_ids_T), len(spans)))
    body = [_bytes_of(tensors[name]) for name in layout]
    digest = _digest([header, *body])
    header[DIGEST_AT : DIGEST_AT + len(digest)] = digest.encode()
    return Encoded((memoryview(header), *body), digest)


def _check_name(record_id: str, source: str) -> None:
    if not is_digest(record_id):
        _refuse(record_id, "the id is not a content id of 32 lower-case hex digits", "record_id")
    if not source or len(source) > MAX_SOURCE or not source.isprintable():
        _refuse(record_id, f"the source name {source[:80]!r} is empty, too long or unprintable", "record_source")


def _check_tokens(
    identity: StoreIdentity, record_id: str, input_ids_T: torch.Tensor, spans: Sequence[Sequence[int]]
) -> None:
    if input_ids_T.dim() != 1 or input_ids_T.dtype not in (torch.int32, torch.int64):
        _refuse(record_id, f"token ids are {_describe(input_ids_T)}, not [T] of int32 or int64", "record_tokens")
    tokens = len(input_ids_T)
    if not 1 <= tokens <= identity.max_tokens:
        _refuse(record_id, f"{tokens} tokens, the store holds 1 to {identity.max_tokens}", "record_tokens")
    if not 0 <= int(input_ids_T.min()) <= int(input_ids_T.max()) < 2**31:
        _refuse(record_id, "a token id is negative or above 2^31", "record_tokens")
    previous = 0
    for start, stop in spans:
        if not previous <= start < stop <= tokens:
            listed = [list(span) for span in spans]
            _refuse(record_id, f"{tokens} tokens and the assistant turns {listed}: not in order", "record_spans")
        previous = stop


def _check_states(
    identity: StoreIdentity, record_id: str, tokens: int, aux_TC: torch.Tensor, last_TH: torch.Tensor
) -> None:
    accepts = TORCH_DTYPES[scheme_of(identity.scheme).accepts]
    for name, states, width in ((AUX, aux_TC, identity.width), (LAST, last_TH, identity.hidden_size)):
        if tuple(states.shape) != (tokens, width):
            _refuse(
                record_id, f"{name} is {_describe(states)}, {tokens} token ids need [{tokens}, {width}]", "record_rows"
            )
        if states.dtype != accepts:
            what = f"{name} is {_describe(states)}, scheme {identity.scheme} stores {accepts} and never rounds"
            _refuse(record_id, what, "record_dtype", fix="choose the [store] scheme that fits the server's dtype")
        # Extremes, since NaN wins both: one vectorised pass, 11 ms where isfinite takes 237 (1,000 Kimi rows, bf16).
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(states)):
            row = int((~torch.isfinite(states)).any(dim=1).nonzero()[0])
            _refuse(record_id, f"{name} is not finite, first at token {row} of {tokens}", "record_not_finite")


def _refuse(record_id: str, what: str, reason: str, fix: str = "capture this record again") -> None:
    raise OperatorError(f"record {record_id[:80]}: {what}", fix=fix, reason=reason)


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def quantise(aux_TC: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 rows and their float32 scales [T, L]: one scale per (token, layer), the row's largest value at 448.

    Error per element: at most 1/16 of its value, or 2^-10 of the scale where e4m3 is subnormal.
    """
    rows_TLH = aux_TC.float().reshape(len(aux_TC), layers, -1)
    tiny = torch.finfo(torch.float32).tiny
    scale_TL = (rows_TLH.abs().amax(dim=2) / FP8_MAX).clamp_min(tiny)
    return (rows_TLH / scale_TL[..., None]).flatten(1).to(torch.float8_e4m3fn), scale_TL


def dequantise(aux_TC: torch.Tensor, scale_TL: torch.Tensor) -> torch.Tensor:
    """bf16 rows [T, C] from e4m3 rows and their scales."""
    rows_TLH = aux_TC.float().reshape(*scale_TL.shape, -1)
    return (rows_TLH * scale_TL[..., None]).flatten(1).to(torch.bfloat16)


def view(buffer: Buffer, at: int, slot: TensorSlot) -> torch.Tensor:
    """A tensor over the bytes of `slot` in the record at `at`; nothing is copied, the buffer is kept alive."""
    dtype = TORCH_DTYPES[slot.dtype]
    if slot.count == 0:
        return torch.empty(slot.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=slot.count, offset=at + slot.start).view(slot.shape)


def header_at(buffer: Buffer, at: int) -> Header:
    """The header of the record at `at`; raises ValueError where none is, or its end is beyond the buffer's."""
    length = header_length(bytes(buffer[at : at + 8]))
    header = parse_header(bytes(buffer[at : at + 8 + length]))
    if at + header.nbytes > len(buffer):
        raise ValueError(f"it is {header.nbytes} bytes long and the file ends after {len(buffer) - at}")
    return header


def entry_at(buffer: Buffer, at: int, shard: int, identity_sha: str) -> Entry:
    """The journal line of the record at `at`, from the record alone; raises ValueError unless every byte is right."""
    header = header_at(buffer, at)
    if header.identity != identity_sha:
        raise ValueError(f"it belongs to a store of identity {header.identity[:12]}")
    with memoryview(buffer)[at : at + header.nbytes] as record:
        found = _digest([record])
    if found != header.xxh3:
        raise ValueError(f"its checksum is {found}, its header says {header.xxh3}")
    return Entry(header.id, header.source, shard, at, header.nbytes, header.tokens, header.xxh3)


def fault(buffer: Buffer, entry: Entry, identity_sha: str) -> str:
    """What is wrong with a journalled record, in words; "" if every byte is as written."""
    if entry.end > len(buffer):
        return f"the file ends at {len(buffer)}, the record at {entry.end}"
    try:
        found = entry_at(buffer, entry.offset, entry.shard, identity_sha)
    except ValueError as error:
        return str(error)
    if found != entry:
        return f"the journal says {entry.line().decode().strip()}, the record {found.line().decode().strip()}"
    return ""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    rows = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return rows.reshape(-1).data


def _digest(parts: Sequence[bytes | bytearray | memoryview]) -> str:
    """xxh3-128 of a record whose first part begins with its header, the checksum's own digits taken as '0'."""
    hasher = xxhash.xxh3_128()
    with memoryview(parts[0]) as first:
        hasher.update(first[:DIGEST_AT])
        hasher.update(NO_DIGEST)
        hasher.update(first[DIGEST_AT + len(NO_DIGEST) :])
    for part in parts[1:]:
        hasher.update(part)
    return hasher.hexdigest()
