"""JSON files are whole or absent: after SIGKILL in mid-write, on a full disk, after an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.errors import OperatorError
from backend.runs.atomic import Reserved, read_json, write_json

WRITER = """
import sys
from pathlib import Path
from backend.runs.atomic import write_json
path = Path(sys.argv[1])
print("up", flush=True)
n = 0
while True:
    n += 1
    write_json(path, {"n": n, "pad": "x" * 50_000, "end": n})
"""


def test_what_was_written_is_read_and_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "ü": [None]})
    assert read_json(path) == {"b": 1, "ü": [None]}
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_json(tmp_path / "none.json") is None


def test_a_value_that_is_no_json_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})
    for bad in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"n": bad})
    assert read_json(path) == {"n": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_an_error_of_the_disk_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "target"
    path.mkdir()  # renaming a file over a folder fails as late as any disk error can
    (path / "inside").write_text("kept")
    with pytest.raises(OSError):
        write_json(path, {"n": 1})
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"half": ')
    with pytest.raises(OperatorError, match=r"a\.json is not valid JSON") as error:
        read_json(path)
    assert error.value.reason == "bad_json"


@pytest.mark.slow
def test_sigkill_in_mid_write_never_leaves_half_a_file(tmp_path: Path) -> None:
    seen = set()
    for index in range(20):
        path = tmp_path / f"{index}.json"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        for _ in range(1 + index * 7):  # killed after another number of scheduling turns each time
            os.sched_yield()
            read_json(path)
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        record = read_json(path)
        if record is not None:
            assert record["n"] == record["end"]
            seen.add(record["n"])
    assert seen, "no writer got as far as one file: the test has tested nothing"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system needs a mount, which needs root")
@pytest.mark.slow
def test_an_end_can_be_recorded_on_a_full_disk(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from backend.runs.atomic import Reserved, read_json, write_json
folder = Path(sys.argv[1])
reserved = Reserved(folder / "exit.json")
try:
    with open(folder / "fill", "wb", buffering=0) as fill:
        while True:
            fill.write(b"x" * 65536)
except OSError as error:
    print("full:", error.errno)
try:
    write_json(folder / "plain.json", {"code": 0})
except OSError as error:
    print("plain:", error.errno)
reserved.write({"code": 0})
print(read_json(folder / "exit.json"), sorted(p.name for p in folder.iterdir()))
"""
    script = 'mount -t tmpfs -o size=256k none "$0" && exec "$1" -c "$2" "$0"'
    argv = ["unshare", "--mount", "sh", "-c", script, str(tmp_path), sys.executable, code]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["full: 28", "plain: 28", "{'code': 0} ['exit.json', 'fill']"], done.stderr


def test_a_reserved_file_is_written_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    reserved = Reserved(path)
    assert not path.exists()
    reserved.write({"code": 3})
    assert read_json(path) == {"code": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["exit.json"]
