"""The audit log: whole lines whoever writes at the same time, and no line is swallowed by a killed writer's part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.errors import OperatorError
from backend.runs.audit import AuditLog


def test_lines_of_writers_at_the_same_time_stay_whole(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: audit.append("delete", "before", who="w", n=n, pad="x" * 9000), range(40)))
    assert sorted(entry.facts["n"] for entry in audit.entries()) == list(range(40))
    assert audit.path.stat().st_mode & 0o777 == 0o600


def test_a_part_of_a_line_swallows_no_other(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.append("delete", "before", who="w")
    with audit.path.open("ab") as file:
        file.write(b'{"t": 1, "ho')
    audit.append("delete", "after", who="w")
    assert [entry.phase for entry in audit.entries()] == ["before", "after"]


def test_an_edited_log_is_named_with_its_line(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.append("delete", "before", who="w")
    with audit.path.open("ab") as file:
        file.write(b'{"action": "delete"}\n')
    with pytest.raises(OperatorError, match=r"audit\.jsonl:2 is no audit entry") as error:
        audit.entries()
    assert error.value.reason == "audit_damaged"


def test_no_log_yet_is_an_empty_one(tmp_path: Path) -> None:
    assert AuditLog(tmp_path / "audit.jsonl").entries() == ()
