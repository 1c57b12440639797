"""The agent as one file: a content-addressed zipapp of `backend`, `patches/` and the single-file NVML binding.

Owns what goes in, the name (`agent-<sha256 of the file>.pyz`) and the way it gets into place: written beside its final
name, synced, renamed. The same contents give the same bytes on any machine, so a host can check what it received by
its name alone. Nothing is executed here, and `pynvml` is copied without being imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import backend
from backend.errors import OperatorError, UsageError

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date a zip can hold: times must not change the bytes
_MAIN = b"import sys\n\nfrom backend.agent.__main__ import main\n\nsys.exit(main())\n"


@dataclass(frozen=True)
class Bundle:
    """The zipapp in memory. `sha` is the SHA-256 of `data`, in hex."""

    data: bytes
    sha: str

    @property
    def name(self) -> str:
        """The file name, the same on every machine."""
        return f"agent-{self.sha}.pyz"


def build() -> Bundle:
    """Pack the `backend` that this console runs with."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(_contents().items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def install(bundle: Bundle, folder: Path) -> Path:
    """Put the bundle into `folder` under its name, if it does not stand there already.

    Raises:
        OperatorError: a file of that name has other contents (reason ``agent_damaged``).
        UsageError: the folder cannot be written (reason ``bad_home``).
    """
    try:
        return _install(bundle, folder)
    except OSError as error:
        raise UsageError(
            f"the agent cannot be written to {folder}: {error.strerror}",
            fix="choose a state folder with room that you may write: [host] home or $EAGLE3_HOME",
            reason="bad_home",
        ) from error


def _install(bundle: Bundle, folder: Path) -> Path:
    target = folder / bundle.name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if target.exists():
        if hashlib.sha256(target.read_bytes()).hexdigest() != bundle.sha:
            raise OperatorError(
                f"{target} is damaged: its contents do not have the hash in its name",
                fix=f"remove {target} and try again",
                reason="agent_damaged",
            )
        return target
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".agent-")
    try:
        with open(descriptor, "wb") as file:
            file.write(bundle.data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).rename(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _contents() -> Mapping[str, bytes]:
    """Archive name → bytes."""
    package = Path(backend.__file__).resolve().parent
    found = {f"backend/{name}": data for name, data in _tree(package)}
    checkout = package.parent / "patches"
    if not (package / "_patches").is_dir() and checkout.is_dir():
        found |= {f"backend/_patches/{name}": data for name, data in _tree(checkout)}
    binding = importlib.util.find_spec("pynvml")
    if binding is not None and binding.origin is not None:
        found["pynvml.py"] = Path(binding.origin).read_bytes()
    return found | {"__main__.py": _MAIN}


def _tree(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below `folder` that belongs to the product, named relative to it with forward slashes."""
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not hidden and path.suffix != ".pyc":
            yield relative.as_posix(), path.read_bytes()
