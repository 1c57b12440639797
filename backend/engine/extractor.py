"""The extractor: records through a capturing server into the store, many in flight, each verified on arrival.

Client of the extraction server and of the store's writer; owns the rules of the exchange (length order, one try more
for a failed record, the dump file removed once its record is in the store or has failed). Knows nothing of stages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from backend.data.merged import MergedRecord
from backend.engine.capture import Capture, read_capture
from backend.engine.client import AsyncSGLangClient
from backend.errors import OperatorError
from backend.report import Reporter
from backend.store.writer import StoreWriter

TRIES = 2
_NOT_THE_RECORD = frozenset({"record_dtype", "disk_full", "store_write", "store_closed"})
"""Reasons of `StoreWriter.append` that the next record would meet too: nothing is won by going on."""


@dataclass
class Extraction:
    """Counters of one extraction. `failed` maps record ids to the reason of their last failure."""

    total: int
    done: int = 0
    tokens: int = 0
    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)


class Extractor:
    """One extraction run over one server."""

    def __init__(
        self,
        client: AsyncSGLangClient,
        writer: StoreWriter,
        dump_dir: Path,
        launch_id: str,
        reporter: Reporter,
        server_error: Callable[[], OperatorError | None],
    ) -> None:
        """`server_error` says why the server is gone, or None while it lives."""
        self.client = client
        self.writer = writer
        self.dump_dir = dump_dir
        self.launch_id = launch_id
        self.reporter = reporter
        self.server_error = server_error

    async def run(self, records: Iterable[MergedRecord], concurrency: int) -> Extraction:
        """Extract every record that the store does not hold yet, shortest first (padding-free batches).

        Raises:
            OperatorError: the server is gone, its dtype does not fit the store, or the disk is full; all that was
                stored before stays. A record that failed is no error here: see `Extraction.failed`.
            asyncio.CancelledError: the caller's task was cancelled; workers stop between records, never inside one.
        """
        wanted = sorted(records, key=lambda record: len(record.input_ids))
        todo = [record for record in wanted if record.id not in self.writer.done_ids]
        state = Extraction(len(wanted), done=len(wanted) - len(todo))
        self.began = time.monotonic()
        queue = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(todo))):
                    group.create_task(self._worker(queue, state))
        except* OperatorError as errors:
            raise _first(errors) from None
        return state

    async def _worker(self, queue: Iterable[MergedRecord], state: Extraction) -> None:
        for record in queue:
            await self._extract_one(record, state)
            seconds = max(1e-9, time.monotonic() - self.began)
            self.reporter.progress(
                state.done, state.total, "records", tokens_s=state.tokens / seconds, gb_s=state.bytes / seconds / 1e9
            )

    async def _extract_one(self, record: MergedRecord, state: Extraction) -> None:
        for attempt in range(1, TRIES + 1):
            rid = f"{record.id}-{attempt}"
            dump = self.dump_dir / f"{rid}.safetensors"
            try:
                capture = await self._capture(record, rid, dump)
                self.writer.append(
                    record.id, record.source, capture.input_ids_T, record.spans, capture.aux_TC, capture.last_TH
                )
            except OperatorError as error:
                if error.reason in _NOT_THE_RECORD:
                    raise
                gone = self.server_error()
                if gone is not None:
                    raise gone from error
                self.reporter.warning(f"record {record.id}, try {attempt} of {TRIES}: {error.what}")
                state.failed[record.id] = error.what
                continue
            finally:
                dump.unlink(missing_ok=True)
            state.failed.pop(record.id, None)
            state.done += 1
            state.tokens += len(record.input_ids)
            state.bytes += capture.nbytes
            return

    async def _capture(self, record: MergedRecord, rid: str, dump: Path) -> Capture:
        """One request; its dump is complete when the reply is there (the plugin writes before the server answers)."""
        await self.client.generate(record.input_ids, rid=rid, max_new_tokens=1)
        capture = read_capture(dump)
        if capture.input_ids_T.tolist() != list(record.input_ids):
            raise OperatorError(
                f"record {record.id}: captured ids differ from the {len(record.input_ids)} that were sent",
                reason="capture_mismatch",
            )
        if capture.launch_id != self.launch_id:
            raise OperatorError(
                f"record {record.id} was captured by launch {capture.launch_id}, not by {self.launch_id}",
                reason="capture_mismatch",
            )
        return capture


def _first(errors: BaseExceptionGroup[OperatorError]) -> OperatorError:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
