"""A real writer process, killed with SIGKILL at random points and started again until it is done: the store is the
undisturbed one, byte for byte. And a real disk that is full, and a real file size limit."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backend.errors import OperatorError
from backend.report import Silent
from backend.store.reader import Store
from backend.store.verify import stat, verify
from tests.unit.store_support import build, content, identity, open_writer, sample

pytestmark = pytest.mark.slow
REPO = Path(__file__).resolve().parents[2]
COUNT = 60
TOKENS = 400
WHO = identity(hidden_size=256)

CHILD = """
import sys
from pathlib import Path
from tests.integration.test_store_kill import write_all_records
write_all_records(Path(sys.argv[1]), int(sys.argv[2]))
"""


def write_all_records(root: Path, repeat: int, *, reserve_bytes: int = 0) -> None:
    """What the killed process does: append what is missing, one line of output per record, then seal."""
    with open_writer(root, WHO, shard_bytes=8 << 20, reserve_bytes=reserve_bytes) as writer:
        print(json.dumps({"adopted": writer.adopted, "quarantined": writer.quarantined}), flush=True)
        for number in range(COUNT):
            one = sample(number, WHO, TOKENS * repeat)
            if one.id not in writer.done_ids:
                one.append_to(writer)
                print(number, flush=True)
        writer.seal()


def child(root: Path, repeat: int = 1, *, preamble: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", preamble + CHILD, str(root), str(repeat)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_and_kill(root: Path, draw: random.Random) -> tuple[bool, dict[str, int]]:
    """One life of the writer: SIGKILL once it has told of a random number of records. True if it lived to the end."""
    process = child(root)
    assert process.stdout is not None
    first = process.stdout.readline()
    for _ in range(draw.randrange(0, 40)):
        if not process.stdout.readline():
            break
    process.send_signal(signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), stderr
    return process.returncode == 0, json.loads(first)


def killed_until_done(root: Path, seed: int) -> tuple[int, int]:
    """Lives needed, and lives that found unfinished work of the one before."""
    draw = random.Random(seed)
    lives = traces = 0
    done = False
    while not done:
        done, found = run_and_kill(root, draw)
        lives += 1
        traces += found["adopted"] > 0 or found["quarantined"] > 0
        assert lives < 100, "it never gets on"
        stopped = verify(root, full=True, reporter=Silent())
        assert stopped.ok, stopped.describe()
    return lives, traces


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "s"
    write_all_records(root, 1)
    return root


def same(root: Path, undisturbed: Path) -> None:
    assert content(root) == content(undisturbed)
    assert stat(root).sealed
    report = verify(root, full=True, reporter=Silent())
    assert report.ok, report.describe()


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_killed_at_random_points_ends_in_the_undisturbed_store(
    seed: int, tmp_path: Path, undisturbed: Path
) -> None:
    lives, _ = killed_until_done(tmp_path / "s", seed)
    assert lives > 1, "it was never killed"
    same(tmp_path / "s", undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_a_writer_killed_at_random_points_ends_in_the_undisturbed_store_every_time(
    seed: int, tmp_path: Path, undisturbed: Path
) -> None:
    lives, traces = killed_until_done(tmp_path / "s", seed)
    print(f"seed {seed}: {lives} lives, {traces} found unfinished work")
    same(tmp_path / "s", undisturbed)


def test_two_processes_cannot_write_one_store(tmp_path: Path) -> None:
    process = child(tmp_path / "s", repeat=8)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(OperatorError, match=f"process {process.pid} ") as caught:
        open_writer(tmp_path / "s", WHO)
    assert caught.value.reason == "store_locked"
    process.kill()
    process.communicate()
    open_writer(tmp_path / "s", WHO).close()


def test_the_file_size_limit_of_the_kernel_stops_the_writer_cleanly(tmp_path: Path, undisturbed: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000000, 3000000))\n"
    process = child(tmp_path / "s", preamble=limit)
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "writing stopped" in stderr
    assert "File too large" in stderr
    assert verify(tmp_path / "s", full=True, reporter=Silent()).ok
    write_all_records(tmp_path / "s", 1)
    same(tmp_path / "s", undisturbed)


FULL = """
import os, shutil, subprocess, sys
from pathlib import Path
from backend.errors import OperatorError
from backend.report import Silent
from backend.store.verify import verify
from tests.integration.test_store_kill import write_all_records
folder = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=True)
(folder / "ballast").write_bytes(bytes(9_000_000))
try:
    write_all_records(folder / "s", 1, reserve_bytes=int(sys.argv[3]))
except OperatorError as error:
    print("STOPPED", error.reason, error.what)
report = verify(folder / "s", full=True, reporter=Silent())
print("AFTER", report.ok, report.describe())
(folder / "ballast").unlink()
subprocess.run(["mount", "-o", "remount,size=200m", str(folder)], check=True)
write_all_records(folder / "s", 1)
shutil.copytree(folder / "s", sys.argv[2])
"""


@pytest.mark.parametrize(
    ("reserve", "words"), [(0, "stay in reserve"), (-(1 << 40), "No space left on device")], ids=["budget", "ENOSPC"]
)
def test_a_disk_that_is_really_full_stops_the_writer_and_more_space_lets_it_go_on(
    reserve: int, words: str, tmp_path: Path, undisturbed: Path
) -> None:
    """Once by the budget, and once by the disk itself (a negative reserve switches the budget off)."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here: the full disk is a file size limit and an injected error above")
    (tmp_path / "disk").mkdir()
    command = [*unshare, sys.executable, "-c", FULL, str(tmp_path / "disk"), str(tmp_path / "s"), str(reserve)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "STOPPED disk_full" in result.stdout
    assert words in result.stdout
    assert "AFTER True" in result.stdout
    same(tmp_path / "s", undisturbed)


def test_building_in_this_process_and_in_another_gives_the_same_bytes(tmp_path: Path) -> None:
    """The premise of the comparisons above: samples are equal across processes."""
    script = (
        "import sys; from pathlib import Path; from tests.unit.store_support import build; build(Path(sys.argv[1]), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "there")], cwd=REPO, check=True)
    samples = build(tmp_path / "here", 9)
    assert content(tmp_path / "here") == content(tmp_path / "there")
    with Store.open(tmp_path / "there") as store:
        assert all(one.same_as(store) for one in samples)
