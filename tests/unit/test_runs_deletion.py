"""Deletion refuses every attack with the data intact, binds consent to content, and can be undone.

Each test names one way in which people lost data; `precious` stands next door and must survive all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.errors import Refused
from backend.runs import deletion
from backend.runs.adoption import adopt, look_for_adoption
from backend.runs.allow import Allow, add_root, load
from backend.runs.audit import AuditLog
from backend.runs.beneath import Opener, choose_opener, open_by_component, open_by_kernel
from backend.runs.deletion import DeletePlan, apply_delete, pending_trash, plan_delete, purge_trash, undo
from backend.runs.marker import MARKER, write_marker
from backend.runs.target import TRASH_PREFIX

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root (mounts, foreign owners)")


class Case:
    """A root with a marked cache of 20 files, something precious next door, and one way to open folders."""

    def __init__(self, tmp_path: Path, opener: Opener) -> None:
        self.base = Path(os.path.realpath(tmp_path))
        self.root, self.cache, self.precious = (self.base / name for name in ("root", "root/cache", "precious"))
        (self.cache / "rows").mkdir(parents=True)
        self.precious.mkdir()
        (self.precious / "m").write_text("gold")
        for number in range(20):
            (self.cache / "rows" / f"{number}.ckpt").write_text("x" * 100)
        write_marker(self.cache, "hidden-state-store", "u1", "test")
        self.opener = opener
        self.allow = Allow((self.root,))
        self.audit = AuditLog(self.base / "audit.jsonl")

    def plan(self, rel: str = "cache", root: Path | None = None, **more: Any) -> DeletePlan:
        options: dict[str, Any] = {"references": (), "opener": self.opener, **more}
        return plan_delete(root or self.root, rel, self.allow, **options)

    def apply(self, plan: DeletePlan, consent: str | None = None, **more: Any) -> deletion.Trashed:
        options: dict[str, Any] = {"references": (), "audit": self.audit, "who": "t", "opener": self.opener, **more}
        return apply_delete(plan, plan.sha if consent is None else consent, self.allow, **options)

    def refused(self, reason: str, call: Callable[[], object]) -> None:
        """The call is refused for this reason and nothing has moved, here or next door."""
        before = listing(self.base)
        with pytest.raises(Refused) as error:
            call()
        assert error.value.reason == reason, str(error.value)
        assert listing(self.base) == before
        assert (self.precious / "m").read_text() == "gold"


def listing(base: Path) -> list[tuple[str, int]]:
    return sorted(
        (str(path.relative_to(base)), path.lstat().st_ino) for path in base.rglob("*") if path.name != "audit.jsonl"
    )


@pytest.fixture(params=[open_by_kernel, open_by_component], ids=["openat2", "by-component"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    if request.param is open_by_kernel and choose_opener() is not open_by_kernel:
        pytest.skip("openat2 is missing or forbidden here")
    return Case(tmp_path, request.param)


def test_the_plan_says_what_would_go_and_changes_nothing(case: Case) -> None:
    before = listing(case.base)
    plan = case.plan()
    size = (case.cache / MARKER).stat().st_size
    assert (plan.files, plan.folders, plan.bytes) == (21, 1, 2000 + size)
    assert (plan.kind, plan.marker_id, plan.uid) == ("hidden-state-store", "u1", os.geteuid())
    assert plan.phrase == f"{os.uname().nodename}/cache"
    assert listing(case.base) == before
    assert DeletePlan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_the_same_content_has_the_same_sha_whenever_it_is_planned(case: Case) -> None:
    assert case.plan().sha == case.plan().sha


@pytest.mark.parametrize("rel", ["../precious", "", ".", "/etc", "cache/../../precious", "cache//rows", "cache/"])
def test_a_path_that_is_not_plain_is_refused(case: Case, rel: str) -> None:
    case.refused("bad_path", lambda: case.plan(rel))


def test_a_root_that_is_not_allowed_is_refused(case: Case) -> None:
    case.refused("root_not_allowed", lambda: case.plan("root/cache", case.base))


def test_a_symlink_in_place_of_the_folder_is_refused(case: Case) -> None:
    plan = case.plan()
    case.cache.rename(case.root / "moved")
    case.cache.symlink_to(case.precious)
    case.refused("symlink", case.plan)
    case.refused("symlink", lambda: case.apply(plan))


def test_a_symlink_on_the_way_is_refused(case: Case) -> None:
    (case.root / "way").symlink_to(case.cache)
    case.refused("symlink", lambda: case.plan("way/rows"))


def test_a_symlink_inside_is_an_entry_and_never_followed(case: Case) -> None:
    (case.cache / "link").symlink_to(case.precious)
    plan = case.plan()
    assert plan.files == 22
    purge_now(case, case.apply(plan))
    assert not case.cache.exists() and (case.precious / "m").read_text() == "gold"


def test_another_folder_under_the_same_name_is_refused(case: Case) -> None:
    plan = case.plan()
    case.cache.rename(case.root / "moved")
    case.cache.mkdir()
    write_marker(case.cache, "hidden-state-store", "u2", "someone")
    case.refused("content_changed", lambda: case.apply(plan))


def test_a_copied_folder_does_not_inherit_the_marker(case: Case) -> None:
    plan = case.plan()
    case.cache.rename(case.root / "moved")
    shutil.copytree(case.root / "moved", case.cache)
    case.refused("foreign_marker", case.plan)
    case.refused("foreign_marker", lambda: case.apply(plan))


def test_a_marker_of_another_host_is_refused(case: Case) -> None:
    marker = json.loads((case.cache / MARKER).read_text())
    (case.cache / MARKER).write_text(json.dumps({**marker, "host": "elsewhere"}))
    case.refused("foreign_marker", case.plan)


def test_a_folder_without_a_marker_is_refused(case: Case) -> None:
    (case.cache / MARKER).unlink()
    case.refused("no_marker", case.plan)
    (case.cache / MARKER).symlink_to(case.precious / "m")
    case.refused("no_marker", case.plan)


def test_a_marker_of_another_kind_is_refused(case: Case) -> None:
    case.refused("foreign_marker", lambda: case.plan(kind="checkpoint"))


@pytest.mark.parametrize("change", ["added", "removed", "grown", "touched"])
def test_content_that_changed_since_the_plan_is_refused(case: Case, change: str) -> None:
    plan = case.plan()
    one = case.cache / "rows/1.ckpt"
    if change == "added":
        (case.cache / "rows/new").write_text("1")
    elif change == "removed":
        one.unlink()
    elif change == "grown":
        one.write_text("x" * 101)
    else:
        os.utime(one)
    case.refused("content_changed", lambda: case.apply(plan))


def test_consent_must_name_the_plan(case: Case) -> None:
    plan = case.plan()
    for words in ("yes", "", plan.sha[:8], plan.phrase):
        case.refused("no_consent", lambda words=words: case.apply(plan, words))  # type: ignore[misc]


def test_an_edited_plan_is_refused(case: Case) -> None:
    plan = replace(case.plan(), rel="precious")
    case.refused("plan_edited", lambda: case.apply(plan))


def test_a_plan_of_another_host_is_refused(case: Case) -> None:
    plan = replace(case.plan(), host="elsewhere")
    plan = replace(plan, sha=plan.content_sha())
    case.refused("other_host", lambda: case.apply(plan))


def test_consent_ages_fifteen_minutes_or_a_day_after_freezing(case: Case) -> None:
    now = time.time()
    plan = case.plan()
    old = replace(plan, time=now - 16 * 60)
    case.refused("plan_expired", lambda: case.apply(old))
    case.refused("plan_expired", lambda: case.apply(replace(plan, time=now + 3600)))
    case.refused("plan_expired", lambda: case.apply(old, frozen_at=now))
    yesterday = replace(plan, time=now - 25 * 3600)
    case.refused("plan_expired", lambda: case.apply(yesterday, frozen_at=now - 25 * 3600 + 60))
    this_morning = replace(plan, time=now - 23 * 3600)
    assert case.apply(this_morning, frozen_at=now - 23 * 3600 + 60).path.is_dir()


def test_a_folder_that_runs_refer_to_is_refused(case: Case) -> None:
    case.refused("referenced", lambda: case.plan(references=("pipeline P1, stage train",)))


def test_a_listing_of_runs_that_failed_never_means_that_none_refers_to_it(case: Case) -> None:
    case.refused("references_unknown", lambda: case.plan(references=None))


def test_an_open_file_a_mapping_or_a_working_directory_inside_is_refused(case: Case) -> None:
    plan = case.plan()
    with (case.cache / "rows/1.ckpt").open():
        case.refused("in_use", lambda: case.apply(plan))
    hold = "import mmap,sys; f=open(sys.argv[1],'r+b'); m=mmap.mmap(f.fileno(),0); f.close(); print('up',flush=True)"
    for argv, cwd in (
        ([sys.executable, "-c", f"{hold}; sys.stdin.read()", str(case.cache / "rows/2.ckpt")], "/"),
        ([sys.executable, "-c", "import sys; print('up',flush=True); sys.stdin.read()"], str(case.cache / "rows")),
    ):
        with subprocess.Popen(argv, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
            assert user.stdout is not None and user.stdout.readline() == b"up\n"
            case.refused("in_use", lambda: case.apply(plan))
            user.communicate()
    assert case.apply(plan).path.is_dir()


@pytest.fixture
def mounts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bind(source: Path, target: Path, stack: ExitStack) -> None:
    done = subprocess.run(["mount", "--bind", str(source), str(target)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no bind mounts here: {done.stderr.strip()}")
    stack.callback(subprocess.run, ["umount", str(target)], check=True)


@ROOT_ONLY
def test_a_bind_mount_inside_is_refused_where_rm_would_empty_it(case: Case, mounts: ExitStack) -> None:
    plan = case.plan()
    (case.cache / "rows/in").mkdir()
    bind(case.precious, case.cache / "rows/in", mounts)
    for call in (case.plan, lambda: case.apply(plan)):
        with pytest.raises(Refused) as error:
            call()
        assert error.value.reason == "mount"
    assert (case.precious / "m").read_text() == "gold" and (case.cache / "rows/in/m").read_text() == "gold"


@ROOT_ONLY
def test_a_bind_mount_on_the_way_is_refused(case: Case, mounts: ExitStack) -> None:
    (case.root / "door").mkdir()
    bind(case.base, case.root / "door", mounts)
    for rel in ("door/root", "door/precious", "door"):
        with pytest.raises(Refused) as error:
            case.plan(rel)
        assert error.value.reason == "mount"


@ROOT_ONLY
def test_use_through_another_path_is_found_by_inode(case: Case, mounts: ExitStack) -> None:
    (case.base / "volume").mkdir()
    bind(case.cache, case.base / "volume", mounts)
    plan = case.plan()
    with (case.base / "volume/rows/1.ckpt").open():
        with pytest.raises(Refused) as error:
            case.apply(plan)
        assert error.value.reason == "in_use"


@ROOT_ONLY
def test_folders_of_another_user_are_refused_even_by_root(case: Case) -> None:
    os.chown(case.cache / "rows", 12345, 12345)
    case.refused("foreign_owner", case.plan)
    os.chown(case.cache / "rows", 0, 0)
    os.chown(case.cache, 12345, 12345)
    case.refused("foreign_owner", case.plan)


def test_a_swap_at_the_last_moment_is_put_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = case.plan()
    rename = deletion._rename_new

    def swap_first(parent_fd: int, old: str, new: str, reason: str) -> None:
        if new.startswith(TRASH_PREFIX):
            case.cache.rename(case.root / "aside")
            case.precious.rename(case.cache)
        rename(parent_fd, old, new, reason)

    monkeypatch.setattr(deletion, "_rename_new", swap_first)
    with pytest.raises(Refused) as error:
        case.apply(plan)
    assert error.value.reason == "swapped"
    assert (case.cache / "m").read_text() == "gold" and len(list((case.root / "aside/rows").iterdir())) == 20


def test_what_was_written_at_the_last_moment_is_not_lost(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = case.plan()
    rename = deletion._rename_new

    def write_first(parent_fd: int, old: str, new: str, reason: str) -> None:
        if new.startswith(TRASH_PREFIX):
            (case.cache / "rows/new").write_text("result of a long night")
        rename(parent_fd, old, new, reason)

    monkeypatch.setattr(deletion, "_rename_new", write_first)
    with pytest.raises(Refused) as error:
        case.apply(plan)
    assert error.value.reason == "content_changed"
    assert (case.cache / "rows/new").read_text() == "result of a long night"


def test_undo_restores_everything(case: Case) -> None:
    before = listing(case.base)
    trashed = case.apply(case.plan())
    assert not case.cache.exists() and trashed.path.name.startswith(".eagle3-trash-")
    assert pending_trash(case.audit) == (trashed,)
    assert undo(trashed, case.allow, audit=case.audit, who="t", opener=case.opener) == case.cache
    assert listing(case.base) == before
    assert pending_trash(case.audit) == ()
    assert case.plan().files == 21


def test_undo_does_not_overwrite_what_stands_there_now(case: Case) -> None:
    trashed = case.apply(case.plan())
    case.cache.mkdir()
    case.refused("undo_blocked", lambda: undo(trashed, case.allow, audit=case.audit, who="t", opener=case.opener))


def purge_now(case: Case, trashed: deletion.Trashed) -> deletion.Purged:
    late = replace(trashed, time=trashed.time - deletion.UNDO_WINDOW_S - 1)
    return purge_trash(late, case.allow, audit=case.audit, who="t", opener=case.opener)


def test_nothing_is_unlinked_before_the_undo_window_is_over(case: Case) -> None:
    trashed = case.apply(case.plan())
    case.refused("undo_window", lambda: purge_trash(trashed, case.allow, audit=case.audit, who="t", opener=case.opener))
    assert purge_now(case, trashed).files == 21
    assert [path.name for path in case.root.iterdir()] == []
    assert pending_trash(case.audit) == ()


def test_a_purge_that_was_cut_off_can_be_done_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    trashed = case.apply(case.plan())
    unlink, count = os.unlink, iter(range(100))

    def fails_later(path: str, *, dir_fd: int | None = None) -> None:
        if next(count) == 7:
            raise OSError(5, "Input/output error")
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", fails_later)
    with pytest.raises(OSError, match="Input/output"):
        purge_now(case, trashed)
    monkeypatch.undo()
    assert pending_trash(case.audit) == (trashed,)
    assert purge_now(case, trashed).files == 14
    assert not trashed.path.exists()


def test_trash_that_is_not_what_was_put_there_is_not_purged(case: Case) -> None:
    trashed = case.apply(case.plan())
    trashed.path.rename(case.root / "aside")
    shutil.copytree(case.root / "aside", trashed.path)
    case.refused("foreign_marker", lambda: purge_now(case, trashed))


def test_a_rename_whose_second_audit_line_was_lost_can_still_be_undone(case: Case) -> None:
    trashed = case.apply(case.plan())
    lines = case.audit.path.read_bytes().splitlines(keepends=True)
    case.audit.path.write_bytes(b"".join(lines[:-1]))
    assert pending_trash(case.audit) == (trashed,)


def test_every_change_and_every_refusal_is_audited(case: Case) -> None:
    plan = case.plan()
    with pytest.raises(Refused):
        case.apply(plan, "yes")
    trashed = case.apply(plan)
    undo(trashed, case.allow, audit=case.audit, who="t", opener=case.opener)
    steps = [(entry.action, entry.phase) for entry in case.audit.entries()]
    assert steps == [
        ("delete", "refused"),
        ("delete", "before"),
        ("delete", "after"),
        ("undo", "before"),
        ("undo", "after"),
    ]
    assert case.audit.path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_audited_is_not_done(case: Case) -> None:
    plan = case.plan()
    case.audit.path.mkdir()
    before = listing(case.root)
    with pytest.raises(OSError):
        case.apply(plan)
    assert listing(case.root) == before


def test_without_an_allow_file_nothing_may_be_deleted(tmp_path: Path) -> None:
    assert load(tmp_path / "allow.json") == Allow()


def test_an_allow_file_that_others_can_touch_is_refused(case: Case) -> None:
    path = case.base / "state/allow.json"
    path.parent.mkdir()
    assert add_root(path, case.root) == case.allow == load(path)
    path.chmod(0o644)
    with pytest.raises(Refused) as error:
        load(path)
    assert error.value.reason == "allow_insecure"


@pytest.mark.parametrize("root", ["/", "/data", "/etc/ssl", "/usr/local/lib", "relative", "/proc/1", "/dev/shm", "~"])
def test_a_root_too_wide_to_be_one_is_refused(tmp_path: Path, root: str) -> None:
    with pytest.raises(Refused) as error:
        add_root(tmp_path / "allow.json", Path(root))
    assert error.value.reason == "bad_root"


def test_home_a_symlink_and_our_own_state_are_no_roots(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(case.root))
    (case.base / "link").symlink_to(case.precious)
    state = case.base / "state"
    state.mkdir()
    for root in (case.root, case.base / "link", case.base, state):
        with pytest.raises(Refused) as error:
            add_root(state / "allow.json", root)
        assert error.value.reason == "bad_root"


def test_an_old_cache_is_adopted_only_when_every_file_is_known(case: Case) -> None:
    (case.cache / MARKER).unlink()
    (case.cache / "thesis.tex").write_text("three years")
    options: dict[str, Any] = {"kind": "hidden-state-cache", "audit": case.audit, "who": "t", "opener": case.opener}
    found = look_for_adoption(case.root, "cache", case.allow, ["rows/*.ckpt"], opener=case.opener)
    assert (found.files, found.counts, found.stranger_sample) == (21, {"rows/*.ckpt": 20}, ("thesis.tex",))
    case.refused("strangers", lambda: adopt(found, found.sha, case.allow, **options))
    (case.cache / "thesis.tex").unlink()
    case.refused("no_consent", lambda: adopt(found, "yes", case.allow, **options))
    found = look_for_adoption(case.root, "cache", case.allow, ["rows/*.ckpt"], opener=case.opener)
    (case.cache / "rows/later.ckpt").write_text("1")
    case.refused("content_changed", lambda: adopt(found, found.sha, case.allow, **options))
    found = look_for_adoption(case.root, "cache", case.allow, ["rows/*.ckpt"], opener=case.opener)
    assert adopt(found, found.sha, case.allow, **options).kind == "hidden-state-cache"
    assert case.plan(kind="hidden-state-cache").files == 22


def test_an_empty_folder_is_not_adopted(case: Case) -> None:
    (case.root / "empty").mkdir()
    found = look_for_adoption(case.root, "empty", case.allow, ["*"], opener=case.opener)
    case.refused("nothing_there", lambda: adopt(found, found.sha, case.allow, kind="cache", audit=case.audit, who="t"))
