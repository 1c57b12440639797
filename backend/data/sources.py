"""A source: named files, folders or globs in one format, read as normalised records.

Every value met comes out once, as a `Parsed` or as a `Dropped` with its reason and its place, so that a caller's
counts can add up. Owns how paths become files and how the format is decided; knows nothing of tokens or splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from backend.data.containers import Broken, Found, SourceFile
from backend.data.readers import Detected, check_name, choose
from backend.data.records import Record, Unusable, normalise
from backend.errors import OperatorError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".yml", ".yaml")
_SAMPLES = 20


@dataclass(frozen=True)
class SourceSpec:
    """One source as configured; `max_bad` is the share of its records that may be unreadable before it is refused."""

    name: str
    paths: tuple[str, ...]
    format: str = "auto"
    on_policy: bool = False
    max_records: int | None = None
    max_bad: float = 0.01


@dataclass(frozen=True, slots=True)
class Parsed:
    """A record, what was left off to make it one, and where it stands."""

    record: Record
    repairs: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A value that became no record. `rest_lost` says that nothing behind it in its file was read."""

    reason: str
    where: str
    detail: str
    rest_lost: bool = False


class Source:
    """The files of one source. Can be iterated more than once; `formats` is filled as files are opened."""

    def __init__(self, spec: SourceSpec) -> None:
        """Find the files and look at the beginning of each.

        Raises:
            UsageError: no format has the configured name.
            OperatorError: a path does not exist, a glob or folder yields no file, a file is unreadable or empty.
        """
        check_name(spec.format, spec.name)
        self.spec = spec
        self.files = _expand(spec)
        for path in self.files:
            SourceFile(path).close()
        self.size = sum(path.stat().st_size for path in self.files)
        self.formats: dict[str, Detected] = {}
        self._finished = 0
        self._open: SourceFile | None = None

    @property
    def position(self) -> int:
        """Bytes of `size` that the latest iteration has consumed."""
        return self._finished + (self._open.position if self._open else 0)

    def __iter__(self) -> Iterator[Parsed | Dropped]:
        """Every value of every file, in path order.

        Raises:
            OperatorError: a file is unreadable, empty, or of no known format.
        """
        self._finished = 0
        for path in self.files:
            self._open = SourceFile(path)
            yield from self._read(self._open)
            self._finished, self._open = self._finished + self._open.size, None

    def _read(self, file: SourceFile) -> Iterator[Parsed | Dropped]:
        """One file; its format is decided on the first values that can be read."""
        items = iter(file)
        detected: Detected | None = None
        seen = False
        while chunk := list(islice(items, _SAMPLES)):
            seen = True
            samples = [item.value for item in chunk if isinstance(item, Found)]
            if detected is None and samples:
                detected = choose(self.spec.format, samples, f"{self.spec.name} ({file.path})")
                self.formats.setdefault(detected.format.name, detected)
            for item in chunk:
                if isinstance(item, Broken):
                    yield Dropped(item.reason, item.where, item.detail, item.rest_lost)
                elif detected is not None:
                    yield _parse(item, detected)
        if not seen:
            raise OperatorError(
                f"source {self.spec.name}: {file.path} holds no record",
                fix="remove it from the source's paths, or fill it",
                reason="empty_source",
            )


def _parse(item: Found, detected: Detected) -> Parsed | Dropped:
    try:
        normal = normalise(detected.format.messages(item.value))
    except Unusable as error:
        return Dropped(error.reason, item.where, error.detail)
    return Parsed(normal.record, normal.repairs, item.where)


def _expand(spec: SourceSpec) -> tuple[Path, ...]:
    """The files behind the paths, sorted within each path, none twice."""
    found: dict[Path, None] = {}
    for entry in spec.paths:
        for path in _files_of(spec, Path(entry).expanduser()):
            found.setdefault(path.resolve())
    return tuple(found)


def _files_of(spec: SourceSpec, path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(child for child in path.rglob("*") if child.is_file() and not child.name.startswith("."))
        files = [child for child in inside if child.name.lower().removesuffix(".gz").endswith(_SUFFIXES)]
        held = f"only {', '.join(sorted({child.suffix or child.name for child in inside}))}" if inside else "nothing"
        what = f"the folder {path} holds no {', '.join(_SUFFIXES)} file (it holds {held})"
    elif any(character in str(path) for character in "*?["):
        base = Path(path.anchor)
        files = sorted(match for match in base.glob(str(path.relative_to(base))) if match.is_file())
        what = f"no file matches {path}"
    else:
        files, what = [], f"{path} does not exist"
    if not files:
        raise OperatorError(
            f"source {spec.name}: {what}",
            fix=f"correct `paths` of [[data.sources]] {spec.name}, or put the files there",
            reason="source_missing",
        )
    return files
