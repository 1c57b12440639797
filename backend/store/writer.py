"""The one writer of a store: append, flush, seal; killed at any instant, it goes on where the disk says it was.

A record counts once its bytes are synced and its journal line is synced after them. That happens for `FLUSH_RECORDS`
records or `FLUSH_BYTES` at a time: a kill of the process loses nothing that was written whole (the next `open` takes
it in), a power cut at most that much. The same records in the same order give the same shards and the same journal,
byte for byte, however often the writer was killed in between.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch

from backend.errors import OperatorError, Refused
from backend.runs.atomic import sync_dir, write_all
from backend.runs.locks import FileLock
from backend.runs.marker import write_marker
from backend.store import folder
from backend.store.folder import MODE, foreign_files, read_journal, read_manifest, shard_name, write_manifest
from backend.store.format import JOURNAL, MANIFEST, STORE_KIND, Entry, Manifest, Seal, StoreIdentity
from backend.store.record import Encoded, encode
from backend.store.recover import Resumed, resume

FLUSH_RECORDS = 32
FLUSH_BYTES = 256 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StoreWriter:
    """Appends captured records to one store. Get it from `open`; use it as a context manager."""

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        found: Resumed,
        lock: FileLock,
        *,
        shard_bytes: int,
        reserve_bytes: int,
        canary_digest: str | None,
        run_id: str,
    ) -> None:
        self.root = root
        self.adopted, self.quarantined = found.adopted, found.quarantined
        """What the last writer left behind: whole records taken in, bytes put into quarantine."""
        self._manifest, self._lock = manifest, lock
        self._shard_bytes, self._reserve_bytes = shard_bytes, reserve_bytes
        self._session = (run_id, canary_digest)
        self._begun = self._closed = False
        self._done = {entry.id for entry in found.entries}
        self._pending: dict[str, Entry] = {}
        self._shard = found.next_shard
        self._end = self._committed = found.open_end or 0
        self._journal_end = found.journal_bytes
        self._journal_fd = os.open(root / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._shard_fd: int | None = None if found.open_end is None else self._open_shard(os.O_APPEND)

    @classmethod
    def open(
        cls,
        root: Path,
        identity: StoreIdentity,
        *,
        shard_bytes: int,
        reserve_bytes: int,
        canary_digest: str | None,
        run_id: str,
    ) -> Self:
        """Create the store in `root`, or go on in it after a look at its tail.

        `shard_bytes`: a shard is finished before it grows past this (a larger record gets a shard of its own).
        `reserve_bytes`: free space that is never used. `canary_digest`, `run_id`: recorded with the records to come.

        Raises:
            Refused: `not_a_store` (the folder holds other files), `store_identity` (made from something else; names
                the first key that differs).
            OperatorError: `store_locked`, `store_damaged`, `store_version`, `store_manifest`.
        """
        root = Path(root)
        if not (root / MANIFEST).exists() and root.exists() and (foreign := foreign_files(root)):
            raise Refused(
                f"{root} is no store and not empty: it holds {', '.join(foreign[:5])}",
                fix="name a new folder, or one made by an earlier extraction",
                reason="not_a_store",
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = folder.lock(root, run_id)
            try:
                manifest = _create_or_read(root, identity, run_id)
                found = resume(root, manifest)
                return cls(
                    root,
                    manifest,
                    found,
                    lock,
                    shard_bytes=shard_bytes,
                    reserve_bytes=reserve_bytes,
                    canary_digest=canary_digest,
                    run_id=run_id,
                )
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise _stopped(f"{root}: cannot be opened for writing: {error.strerror}", error) from error

    @property
    def done_ids(self) -> AbstractSet[str]:
        """Ids of the records that are safe on disk: the ones that need no capture."""
        return self._done

    def append(
        self,
        record_id: str,
        source: str,
        input_ids_T: torch.Tensor,
        spans: Sequence[Sequence[int]],
        aux_TC: torch.Tensor,
        last_TH: torch.Tensor,
    ) -> None:
        """Validate and write one record; durable after the next `flush` (implied every 32 records or 256 MiB).

        Raises:
            OperatorError: a record that must not be stored (`record_…`; it is named, nothing was written); `disk_full`
                before the reserve is touched, or where the disk itself says so; `store_write` for other write errors.
                The store stays whole in every case.
        """
        self._check_open()
        if record_id in self._done or record_id in self._pending:
            raise OperatorError(
                f"record {record_id} is in {self.root} already",
                fix="skip the ids in done_ids; two records with one content id are one record",
                reason="record_duplicate",
            )
        record = encode(self._manifest.identity, record_id, source, input_ids_T, spans, aux_TC, last_TH)
        if self._end and self._end + record.nbytes > self._shard_bytes:
            self._finish_shard()
        self._require_room(record.nbytes)
        self._begin_session()
        self._write(record)
        entry = Entry(record_id, source, self._shard, self._end, record.nbytes, len(input_ids_T), record.xxh3)
        self._pending[record_id] = entry
        self._end = entry.end
        if len(self._pending) >= FLUSH_RECORDS or self._end - self._committed >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make every appended record durable: shard first, journal after it.

        Raises:
            OperatorError: `disk_full`, `store_write`. After a failed sync the pages may be lost although a second sync
                succeeds, so the unsynced records are cut off rather than trusted.
        """
        self._check_open()
        if not self._pending or self._shard_fd is None:
            return
        try:
            os.fsync(self._shard_fd)
        except OSError as error:
            self._fail(error, shard_end=self._committed)
        lines = b"".join(entry.line() for entry in self._pending.values())
        try:
            write_all(self._journal_fd, lines)
            os.fsync(self._journal_fd)
        except OSError as error:
            self._fail(error, journal_end=self._journal_end)
        self._journal_end += len(lines)
        self._committed = self._end
        self._done.update(self._pending)
        self._pending.clear()

    def seal(self) -> Seal:
        """Finish the last shard and write the final counts into the manifest. Sealing again changes nothing.

        Raises:
            OperatorError: `disk_full`, `store_write`.
        """
        self._finish_shard()
        seal = read_journal(self.root).seal()
        if seal != self._manifest.seal:
            self._replace_manifest(replace(self._manifest, seal=seal))
        return seal

    def close(self) -> None:
        """Flush and give the lock back; closing again does nothing."""
        if not self._closed:
            try:
                self.flush()
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_shard(self, flags: int) -> int:
        return os.open(self.root / shard_name(self._shard, open=True), os.O_WRONLY | os.O_CLOEXEC | flags, MODE)

    def _write(self, record: Encoded) -> None:
        try:
            if self._shard_fd is None:
                self._shard_fd = self._open_shard(os.O_APPEND | os.O_CREAT | os.O_EXCL)
                sync_dir(self.root)
            for part in record.parts:
                while part:
                    part = part[os.write(self._shard_fd, part) :]
        except OSError as error:
            self._fail(error, shard_end=self._end)

    def _finish_shard(self) -> None:
        self.flush()
        if self._shard_fd is None:
            return
        try:
            os.close(self._shard_fd)
            self._shard_fd = None
            folder.finish_shard(self.root, self._shard)
        except OSError as error:
            self._fail(error)
        self._shard += 1
        self._end = self._committed = 0

    def _begin_session(self) -> None:
        """Before the first record: the seal is broken, and who writes behind which canary is recorded."""
        if not self._begun:
            self._replace_manifest(self._manifest.with_session(*self._session, len(self._done)))
            self._begun = True

    def _replace_manifest(self, manifest: Manifest) -> None:
        if manifest == self._manifest:
            return
        try:
            write_manifest(self.root, manifest)
        except OSError as error:
            self._fail(error)
        self._manifest = manifest

    def _require_room(self, size: int) -> None:
        facts = os.statvfs(self.root)
        free = facts.f_bavail * facts.f_frsize
        if free - size < self._reserve_bytes:
            self.flush()
            raise OperatorError(
                f"{self.root}: {free:,} bytes are free, {self._reserve_bytes:,} stay in reserve and the next record"
                f" needs {size:,}; {len(self._done):,} records are stored",
                fix="free space or lower [store] reserve_gb, then run extract again: it goes on from here",
                reason="disk_full",
            )

    def _fail(self, error: OSError, *, shard_end: int | None = None, journal_end: int | None = None) -> NoReturn:
        """Cut back what is not whole, give up, and say why."""
        what = f"{self.root}: writing stopped after {len(self._done):,} records: {error.strerror}"
        try:
            if shard_end is not None and self._shard_fd is not None:
                os.ftruncate(self._shard_fd, shard_end)
            if journal_end is not None:
                os.ftruncate(self._journal_fd, journal_end)
        except OSError as second:
            what += f"; cutting back the unfinished part failed too ({second.strerror}), the next run does it"
        self._release()
        raise _stopped(what, error) from error

    def _check_open(self) -> None:
        if self._closed:
            raise OperatorError(f"{self.root}: this writer was closed", reason="store_closed")

    def _release(self) -> None:
        self._closed = True
        if self._shard_fd is not None:
            os.close(self._shard_fd)
            self._shard_fd = None
        os.close(self._journal_fd)
        self._lock.release()


def _create_or_read(root: Path, identity: StoreIdentity, run_id: str) -> Manifest:
    """The manifest of the store in `root`, made where there is none; another store's is refused.

    The marker first and the manifest last: a folder with a manifest is a complete, empty store, and a folder that a
    killed creation left can be created again.
    """
    if not (root / MANIFEST).exists():
        sync_dir(root.parent)
        write_marker(root, STORE_KIND, identity.sha(), run_id)
        folder.append(root / JOURNAL, b"")
        write_manifest(root, Manifest(identity, created_by=run_id))
    manifest = read_manifest(root)
    if difference := manifest.identity.first_difference(identity):
        raise Refused(
            f"{root} was made from something else: {difference}",
            fix="extract into another folder; purge lists the old one",
            reason="store_identity",
        )
    return manifest


def _stopped(what: str, error: OSError) -> OperatorError:
    full = error.errno in _FULL
    return OperatorError(
        what,
        fix=f"{'free space' if full else 'look at the disk'}, then run extract again: it goes on from here",
        reason="disk_full" if full else "store_write",
    )
