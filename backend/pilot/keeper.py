"""The pilot's hold on the operator lease: renewed every 15 s for as long as the pilot lives, given back at its end.

`--auto` holds a lease like a person does, so that two operators cannot drive one host. A thread, because the pilot
blocks for hours on one stage; it touches nothing but the lease file.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from backend.errors import OperatorError
from backend.runs import lease

RENEW_EVERY_S = 15.0


class LeaseKeeper:
    """Context manager around the pilot's work. Without a lease id (a pilot started by hand) it does nothing."""

    def __init__(self, path: Path, lease_id: str | None) -> None:
        self._path = path
        self._id = lease_id
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.lost: OperatorError | None = None

    def require(self) -> None:
        """Refuse to start anything once control was taken over.

        Raises:
            OperatorError: `lease_lost` (exit code 5), naming who took it.
        """
        if self.lost is not None:
            raise self.lost

    def _renew(self) -> None:
        while not self._over.is_set():
            try:
                lease.renew(self._path, str(self._id))
            except OperatorError as error:
                self.lost = error
                return
            except OSError as error:  # a full disk for a moment: the lease is worth another try, it lasts 60 s
                print(f"the lease could not be renewed: {error}", file=sys.stderr, flush=True)
            self._over.wait(RENEW_EVERY_S)

    def __enter__(self) -> Self:
        if self._id:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._id:
            self._over.set()
            self._thread.join()
            lease.release(self._path, self._id)
