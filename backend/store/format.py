"""The one owner of the store's format: names, identity, manifest, record header, journal line. `docs/store.md` is the
same for a reader of another program.

A store is a folder. A shard is a concatenation of *records*, each a complete safetensors image whose size is a
multiple of 4,096 bytes and whose rows begin on a page; a record names itself and carries the checksum of all its
bytes, so a shard can be read, checked and indexed again with nothing else at hand. `journal.jsonl` is the index and
the commit log: a record counts once its line is there. Standard library only; knows no tensors and touches no file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from backend.errors import OperatorError, UsageError

FORMAT = "eagle3-hidden-states"
VERSION = 1
PAGE = 4096
"""Records and their rows start at multiples of this: one direct read, or one page-aligned map, per record."""

STORE_KIND = "hidden-state-store"
"""`kind` of the ownership marker (`backend.runs.marker`)."""
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
LOCK = "lock"
QUARANTINE = "quarantine"
SHARD = re.compile(r"shard-(\d{6,})\.hs(\.tmp)?")

ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4, "I32": 4, "U8": 1}
"""Bytes per element of the safetensors dtypes that occur in a record (little-endian)."""

AUX, LAST, SCALE, IDS, SPANS, PAD = "aux_hidden_state", "hidden_state", "aux_scale", "input_ids", "spans", "_pad"
"""Tensor names of a record. The first two and the ids are named as capture names them."""

_DIGEST_PREFIX = '{"__metadata__":{"xxh3":"'
DIGEST_AT = 8 + len(_DIGEST_PREFIX)
"""Where in a record the 32 hex digits of its checksum stand. The checksum is taken with '0' in their place."""
NO_DIGEST = b"0" * 32
MAX_HEADER = 1 << 20
_HEX32 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Scheme:
    """How states become bytes: safetensors dtypes of the captured layers and of the last hidden state, and whether the
    captured layers carry one float32 scale per (token, layer). `accepts` is the dtype that capture must deliver:
    a store never rounds silently."""

    name: str
    aux: str
    last: str
    scaled: bool
    accepts: str


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", "BF16", "BF16", scaled=False, accepts="BF16"),
        Scheme("float32", "F32", "F32", scaled=False, accepts="F32"),
        # fp8 and not int8: with massive channels (x300) int8 rows lose the others (82 % error against 2.65 %).
        Scheme("aux8", "F8_E4M3", "BF16", scaled=True, accepts="BF16"),
    )
}


def scheme_of(name: str) -> Scheme:
    """The scheme `name`; raises `UsageError` (reason `store_scheme`)."""
    if name not in SCHEMES:
        raise UsageError(
            f"unknown store scheme {name!r}", fix=f"choose one of {', '.join(SCHEMES)}", reason="store_scheme"
        )
    return SCHEMES[name]


def bytes_per_token(scheme: str, hidden_size: int, layers: int = 3) -> int:
    """Bytes of one token's states: 57,344 for Kimi (H = 7168, 3 layers) in bf16, 35,852 in aux8.

    For disk budgets. A record adds 4 bytes a token (ids) and at most three pages (header, padding).
    """
    how = scheme_of(scheme)
    row = layers * ITEM_BYTES[how.aux] * hidden_size + ITEM_BYTES[how.last] * hidden_size
    return row + 4 * layers if how.scaled else row


@dataclass(frozen=True)
class StoreIdentity:
    """All that the numbers in a store depend on. Two stores with one identity are interchangeable.

    `layers` are canonical indices (c = the residual stream at the input of decoder layer c), ascending; `engine` is
    name and version; `revision` the target's revision or the hash of its weights index; `data_digest` the hash of the
    merged data. The canary's digest is not part of it: it stands in the manifest, per session.
    """

    target: str
    revision: str
    engine: str
    route: str
    layers: tuple[int, ...]
    post_norm: bool
    hidden_size: int
    tokenizer_hash: str
    template_hash: str
    max_tokens: int
    scheme: str
    data_digest: str

    def __post_init__(self) -> None:
        scheme_of(self.scheme)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise UsageError(f"capture layers {list(self.layers)} do not ascend from 0", reason="store_layers")
        if self.hidden_size <= 0 or self.hidden_size % 4:
            raise UsageError(
                f"hidden size {self.hidden_size} is not a positive multiple of 4",
                fix="rows must keep every tensor of a record aligned to its element size",
                reason="store_hidden_size",
            )

    @property
    def width(self) -> int:
        """C: columns of the captured layers together."""
        return len(self.layers) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's states under this identity."""
        return bytes_per_token(self.scheme, self.hidden_size, len(self.layers))

    def sha(self) -> str:
        """sha256 of the canonical JSON, format version included: the name of this identity."""
        material = {"format": FORMAT, "version": VERSION, **self.as_json()}
        return hashlib.sha256(_compact(material, sort_keys=True).encode()).hexdigest()

    def first_difference(self, other: StoreIdentity) -> str:
        """The first key that differs with both values (self's first), or "" if none does."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {_show(mine)} here, {_show(theirs)} wanted"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` is its inverse."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoreIdentity:
        """Raises TypeError or ValueError for other keys or values of another type."""
        if not isinstance(data, Mapping) or set(data) != {field.name for field in fields(cls)}:
            raise ValueError("identity has other keys than this version writes")
        for field in fields(cls):
            wanted = {"str": str, "int": int, "bool": bool}.get(str(field.type), list)
            if type(data[field.name]) is not wanted:
                raise TypeError(f"identity: {field.name} is {data[field.name]!r}, not a {wanted.__name__}")
        return cls(**{**data, "layers": tuple(int(layer) for layer in data["layers"])})


@dataclass(frozen=True)
class Session:
    """One writer's visit: the records from number `first_record` on are its own, behind the canary it had passed."""

    run_id: str
    canary_digest: str | None
    first_record: int


@dataclass(frozen=True)
class SealedShard:
    """A finished shard. `xxh3` is the hash of its records' hashes in order."""

    name: str
    records: int
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class Seal:
    """The final counts, written when the last record is in. `journal` is the xxh3-128 of the journal's bytes."""

    records: int
    tokens: int
    nbytes: int
    journal: str
    shards: tuple[SealedShard, ...]


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`: what the store is and who wrote it. `seal` is None while records are still missing."""

    identity: StoreIdentity
    created_by: str
    sessions: tuple[Session, ...] = ()
    seal: Seal | None = None

    def with_session(self, run_id: str, canary_digest: str | None, first_record: int) -> Manifest:
        """Opened for writing: the seal is broken; a session that goes on under the same run and canary is not new."""
        last = self.sessions[-1] if self.sessions else None
        if last and (last.run_id, last.canary_digest) == (run_id, canary_digest):
            return replace(self, seal=None)
        return replace(self, seal=None, sessions=(*self.sessions, Session(run_id, canary_digest, first_record)))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` is its inverse."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity.as_json(),
            "identity_sha": self.identity.sha(),
            "created_by": self.created_by,
            "sessions": [asdict(session) for session in self.sessions],
            "seal": asdict(self.seal) if self.seal else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Manifest:
        """Raises `OperatorError` (reason `store_version` or `store_manifest`) naming `where`."""
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise OperatorError(
                f"{where} is {data.get('format')!r} version {data.get('version')!r}, not {FORMAT} version {VERSION}",
                fix="open it with the version of eagle3-console that wrote it",
                reason="store_version",
            )
        try:
            identity = StoreIdentity.from_json(data["identity"])
            if data["identity_sha"] != identity.sha():
                raise ValueError(f"identity_sha is {data['identity_sha']}, the identity gives {identity.sha()}")
            seal = data["seal"]
            return cls(
                identity=identity,
                created_by=data["created_by"],
                sessions=tuple(Session(**session) for session in data["sessions"]),
                seal=Seal(**{**seal, "shards": tuple(SealedShard(**s) for s in seal["shards"])}) if seal else None,
            )
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise OperatorError(
                f"{where} is no manifest of a store: {error!r}",
                fix="it was changed by hand or the disk is damaged; restore it, the shards are not affected",
                reason="store_manifest",
            ) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: where record `id` stands. `offset` and `nbytes` are multiples of 4,096."""

    id: str
    source: str
    shard: int
    offset: int
    nbytes: int
    tokens: int
    xxh3: str

    @property
    def end(self) -> int:
        """First byte after the record."""
        return self.offset + self.nbytes

    def line(self) -> bytes:
        """The journal line, newline included."""
        return _compact(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Entry:
        """Inverse of `line`; raises ValueError for anything that this version would not have written."""
        data = json.loads(line)
        if not isinstance(data, dict) or tuple(data) != cls.__slots__:
            raise ValueError(f"not the keys {', '.join(cls.__slots__)}")
        numbers = [data["shard"], data["offset"], data["nbytes"], data["tokens"]]
        if any(type(n) is not int or n < 0 for n in numbers) or data["offset"] % PAGE or data["nbytes"] % PAGE:
            raise ValueError("shard, offset, nbytes or tokens is not a count, or is off the page grid")
        if not is_digest(data["id"]) or not is_digest(data["xxh3"]) or not isinstance(data["source"], str):
            raise ValueError("id or xxh3 is not 32 lower-case hex digits")
        return cls(**data)


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor stands: `start` is its first byte, counted from the record's first."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def stop(self) -> int:
        """First byte after the tensor."""
        return self.start + self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """A record's own description. `nbytes` is the size of the whole record."""

    id: str
    source: str
    identity: str
    xxh3: str
    nbytes: int
    tensors: dict[str, TensorSlot]

    @property
    def tokens(self) -> int:
        """T."""
        return self.tensors[IDS].shape[0]


def is_digest(value: object) -> bool:
    """True for 32 lower-case hex digits: a content id, or an xxh3-128."""
    return isinstance(value, str) and _HEX32.fullmatch(value) is not None


def record_tensors(identity: StoreIdentity, tokens: int, spans: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each tensor of a record, in the order on disk; the padding makes the record whole pages."""
    how = scheme_of(identity.scheme)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        AUX: (how.aux, (tokens, identity.width)),
        LAST: (how.last, (tokens, identity.hidden_size)),
        **({SCALE: ("F32", (tokens, len(identity.layers)))} if how.scaled else {}),
        IDS: ("I32", (tokens,)),
        SPANS: ("I32", (spans, 2)),
    }
    size = sum(TensorSlot(dtype, shape, 0).stop for dtype, shape in tensors.values())
    return {**tensors, PAD: ("U8", (-size % PAGE,))}


def build_header(identity: StoreIdentity, record_id: str, source: str, tokens: int, spans: int) -> bytes:
    """Length and JSON of a record's header in whole pages, with '0' for the digits of the checksum."""
    metadata = {
        "xxh3": NO_DIGEST.decode(),
        "id": record_id,
        "source": source,
        "identity": identity.sha(),
        "layers": ",".join(map(str, identity.layers)),
        "post_norm": "true" if identity.post_norm else "false",
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in record_tensors(identity, tokens, spans).items():
        stop = TensorSlot(dtype, shape, at).stop
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = _compact(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def parse_header(start: bytes) -> Header:
    """The header at the start of `start`; raises ValueError for bytes that are not a record's.

    Holds exactly what `build_header` writes: tensors without gaps, whole pages, the names of this version.
    """
    length = header_length(start[:8])
    try:
        data = json.loads(start[8 : 8 + length])
        meta = data.pop("__metadata__")
        tensors: dict[str, TensorSlot] = {}
        at = 8 + length
        for name, told in data.items():
            slot = TensorSlot(told["dtype"], tuple(told["shape"]), at)
            if told["data_offsets"] != [at - 8 - length, slot.stop - 8 - length] or slot.stop < at:
                raise ValueError(f"tensor {name} leaves a gap or overlaps")
            tensors[name], at = slot, slot.stop
        header = Header(meta["id"], meta["source"], meta["identity"], meta["xxh3"], at, tensors)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"its header is not readable: {error!r}") from error
    if at % PAGE or not is_digest(header.id) or not {AUX, LAST, IDS, SPANS, PAD} <= set(tensors):
        raise ValueError("its header is not one of this version")
    return header


def header_length(first: bytes) -> int:
    """Bytes of JSON that follow the first eight; raises ValueError where no header can be."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 0 < length <= MAX_HEADER or (8 + length) % PAGE:
        raise ValueError("no record begins here")
    return length


def _compact(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def _show(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
