"""One operator has control: others are told who, nobody takes over blindly, a lost lease changes nothing more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.errors import Exit, OperatorError
from backend.runs import lease


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "operator.json"


def expire(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = lease._now
    monkeypatch.setattr(lease, "_now", lambda: real() + seconds)


def test_the_second_operator_is_told_who_has_control(path: Path) -> None:
    held = lease.acquire(path, "alice", "laptop-a", 1)
    with pytest.raises(OperatorError, match=r"alice \(on laptop-a\) has control") as error:
        lease.acquire(path, "bob", "laptop-b", 2)
    assert (error.value.reason, error.value.code) == ("lease_held", Exit.CONTROL_HELD)
    assert lease.require(path, held.id) == held


def test_sixteen_at_once_get_one_lease(path: Path) -> None:
    def take(n: int) -> bool:
        try:
            lease.acquire(path, f"o{n}", "h", n)
        except OperatorError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(take, range(16))) == 1


def test_it_expires_unless_renewed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lease.acquire(path, "alice", "a", 1)
    expire(monkeypatch, 59)
    first = lease.renew(path, first.id)
    assert 59 < first.left_s() <= 60
    expire(monkeypatch, 61)
    assert lease.current(path) is None
    second = lease.acquire(path, "bob", "b", 2)
    for verb in (lease.renew, lease.require):
        with pytest.raises(OperatorError, match="taken by bob") as error:
            verb(path, first.id)
        assert error.value.reason == "lease_lost"
    lease.release(path, first.id)
    assert lease.current(path) == second


def test_a_takeover_names_the_lease_that_was_seen(path: Path) -> None:
    alice = lease.acquire(path, "alice", "a", 1)
    bob = lease.takeover(path, alice.id, "bob", "b", 2)
    with pytest.raises(OperatorError, match="bob"):
        lease.takeover(path, alice.id, "carol", "c", 3)
    assert lease.current(path) == bob


def test_after_a_reboot_it_is_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = lease.acquire(path, "alice", "a", 1)
    monkeypatch.setattr(lease, "boot_id", lambda: "another boot")
    assert lease.current(path) is None
    with pytest.raises(OperatorError, match="expired"):
        lease.renew(path, held.id)


def test_given_back_it_is_free(path: Path) -> None:
    held = lease.acquire(path, "alice", "a", 1)
    lease.release(path, held.id)
    lease.acquire(path, "bob", "b", 2)
