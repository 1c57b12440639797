"""The agent's zipapp: the same bytes every time, named by their hash, complete, and never half in place."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from backend.errors import OperatorError, UsageError
from console import bundle


def test_the_same_contents_give_the_same_bytes_under_the_name_of_their_hash() -> None:
    first, second = bundle.build(), bundle.build()
    assert first.data == second.data
    assert first.name == f"agent-{hashlib.sha256(first.data).hexdigest()}.pyz"


def test_the_bundle_runs_on_the_standard_library_alone(tmp_path: Path) -> None:
    """-S -E: no site-packages, no environment; a host has nothing but Python before the first stage."""
    agent = bundle.install(bundle.build(), tmp_path / "agent")
    order = json.dumps({"home": str(tmp_path / "home")})
    done = subprocess.run(
        [sys.executable, "-S", "-E", agent, "hello"], input=order, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["version"] == agent.stem


def test_it_holds_what_the_stages_need_and_no_rubbish(tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle.install(bundle.build(), tmp_path)) as archive:
        names = archive.namelist()
    assert "backend/profiles/demo.toml" in names and "backend/stages/__init__.py" in names
    assert "pynvml.py" in names
    assert any(name.startswith("backend/_patches/sglang/") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert not [name for name in names if name.startswith(("console/", "tests/"))]


def test_a_damaged_agent_is_reported_not_run_and_not_overwritten(tmp_path: Path) -> None:
    made = bundle.build()
    path = bundle.install(made, tmp_path)
    path.write_bytes(b"damaged")
    with pytest.raises(OperatorError, match="damaged") as caught:
        bundle.install(made, tmp_path)
    assert caught.value.reason == "agent_damaged"
    assert path.read_bytes() == b"damaged"


def test_an_install_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle.os, "fsync", full)
    with pytest.raises(UsageError, match="No space"):
        bundle.install(bundle.build(), tmp_path)
    assert list(tmp_path.iterdir()) == []
