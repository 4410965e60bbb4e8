"""Project quotas of work directories, on a file system that has them: ext4 in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spawner_client import DEADLINE_S, SpawnerClient, children, eventually, kill_now
from worker_process import STOCKADE

from stockade.platform import quota
from stockade.platform.quota import DiskQuota, Project
from stockade.sandbox import quota_probe, uids
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import Status
from stockade.sandbox.profiles import Profile

pytestmark = [pytest.mark.needs_lab, pytest.mark.needs_root, pytest.mark.needs_kernel(5, 14)]

# More than half of memory_max, so no tmpfs.
ON_DISK = Limits(memory_max=64 * MIB, workdir_max=48 * MIB, workdir_inodes_max=40, runtime_max=120)
# The one that SpawnerClient's tasks get first.
UID = 1879048193

# Prints how much could be written and how many files made, and the errors that ended both.
FILL = """
import errno, os
def name(error): return errno.errorcode[error.errno]
size = 0
with open("big", "wb", buffering=0) as big:
    try:
        while size < 96 << 20:
            size += big.write(bytes(1 << 20))
            # What waits to be written is memory.
            os.fdatasync(big)
        print(size, "no error")
    except OSError as error:
        print(size, name(error))
os.unlink("big")
made = 0
try:
    while made < 100:
        open(f"f{made}", "x").close()
        made += 1
    print(made, "no error")
except OSError as error:
    print(made, name(error))
"""

# Tries to leave its project in every way there is, prints what each gave, and then fills.
LEAVE = """
import ctypes, errno, fcntl, os, struct
def tried(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def set_project(fd):
    fcntl.ioctl(fd, 0x401C5820, struct.pack("=5I8x", 0, 0, 0, 0, 0))
def clear_flags(fd):
    flags, = struct.unpack_from("=I", fcntl.ioctl(fd, 0x80086601, bytes(8)))
    fcntl.ioctl(fd, 0x40086602, struct.pack("=Q", flags & ~0x20000000))
def file_setattr(fd):
    if ctypes.CDLL(None, use_errno=True).syscall(469, fd, b"", bytes(24), 24, 0x1000) < 0:
        raise OSError(ctypes.get_errno(), "file_setattr")
os.mkdir("d")
open("d/f", "x").close()
for path in (".", "d", "d/f"):
    fd = os.open(path, os.O_RDONLY)
    print(*(tried(lambda: way(fd)) for way in (set_project, clear_flags, file_setattr)))
    os.close(fd)
os.remove("d/f")
os.rmdir("d")
"""

Make = Callable[..., SpawnerClient]
NOTHING = (0, 0, 0, 0)


@contextlib.contextmanager
def mounted(features: str, options: str) -> Iterator[Path]:
    """A new ext4 in a file, mounted where tasks of any uid can get."""
    with tempfile.TemporaryDirectory(prefix="stockade-disk-", dir="/var/tmp") as name:
        place = Path(name)
        place.chmod(0o711)
        image, target = place / "image", place / "mount"
        with image.open("wb") as file:
            file.truncate(256 * MIB)
        target.mkdir()
        for command in (
            ["mkfs.ext4", "-q", *features.split(), image],
            ["mount", "-o", f"loop{options}", image, target],
        ):
            subprocess.run(command, check=True, timeout=DEADLINE_S)
        try:
            yield target
        finally:
            # The last of a spawner's processes may hold its copy of the mount for a moment.
            unmount = ["umount", "-q", target]
            eventually(lambda: subprocess.run(unmount, check=False).returncode == 0)


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A file system that holds project quotas."""
    with mounted("-O project,quota -E quotatype=prjquota", ",prjquota") as target:
        yield target


@pytest.fixture
def make(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes spawners with their directories there, each with the same single uid for tasks."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    clients: list[SpawnerClient] = []

    def make_client(profile: Profile = Profile.PROCESS, **settings: Any) -> SpawnerClient:
        given = {"pool_min": 0, "pool_max": 0, "uid_max": UID, **settings}
        clients.append(SpawnerClient(profile=profile, **given))
        return clients[-1]

    yield make_client
    for client in clients:
        client.close()
    assert quota_of(disk) == NOTHING


def quota_of(place: Path, project: int = UID) -> tuple[int, int, int, int]:
    """Of a project the limits, bytes and files, and what it has of both."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = DiskQuota()
        quota._quotactl_fd(fd, quota._command(quota.Q_GETQUOTA), project, found)
    finally:
        os.close(fd)
    limits = (found.dqb_bhardlimit * quota.QIF_DQBLKSIZE, found.dqb_ihardlimit)
    return (*limits, found.dqb_curspace, found.dqb_curinodes)


def is_limited(place: Path) -> bool:
    size, inodes, _, _ = quota_of(place)
    return size > 0 and inodes > 0


def run(client: SpawnerClient, seq: int, code: str, limits: Limits = ON_DISK) -> list[str]:
    """The words that a Python program prints as a task, which succeeds and has all that it asks."""
    client.start(seq, ["/usr/bin/python3", "-c", code], limits)
    outcome = client.wait_ended(seq)
    printed = client.output(seq).decode()
    assert (outcome.status, outcome.degraded) == (Status.SUCCESS, ()), (outcome, printed)
    client.acknowledge(seq)
    return printed.split()


def rest(client: SpawnerClient) -> None:
    """Waits until the only uid can be taken again."""
    eventually(lambda: not is_limited(client.home))


def assert_held(printed: list[str]) -> None:
    """What FILL printed under ON_DISK."""
    size, size_error, made, made_error = printed
    assert (size_error, made_error) == ("EDQUOT", "EDQUOT")
    # The last mebibyte is written in part, and the file's map takes some.
    assert 46 * MIB <= int(size) <= 48 * MIB
    assert int(made) == 40


@pytest.mark.parametrize("profile", Profile)
def test_work_directory_is_held_to_its_quota_and_the_next_one_starts_at_zero(
    make: Make, disk: Path, profile: Profile
) -> None:
    client = make(profile)
    for seq in (1, 2, 3):
        assert_held(run(client, seq, FILL))
        eventually(lambda: quota_of(disk) == NOTHING)


@pytest.mark.parametrize("profile", Profile)
def test_task_cannot_leave_its_project(make: Make, profile: Profile) -> None:
    printed = run(make(profile), 1, LEAVE + FILL)
    assert printed[:9] == ["EPERM"] * 9
    assert_held(printed[9:])


def test_who_is_not_kept_from_it_leaves_its_project(disk: Path) -> None:
    """What the test above would see if nothing stopped the task."""
    place = disk / "free"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        quota.set_project(fd, Project(UID, inherits=True))
        os.fchown(fd, UID, UID)
        done = subprocess.run(
            ["/usr/bin/python3", "-c", LEAVE],
            cwd=place, user=UID, group=UID, extra_groups=(), capture_output=True, text=True,
            check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            assert line.split()[:2] == ["done", "done"]
        assert quota.project_of(fd) == Project(0, inherits=False)
    finally:
        os.close(fd)
        place.rmdir()
    assert quota_of(disk) == NOTHING


def test_what_a_task_moved_elsewhere_does_not_count_for_the_next_one(
    make: Make, disk: Path
) -> None:
    kept = disk / "kept"
    kept.mkdir()
    kept.chmod(0o777)
    client = make()
    move = f"open('x', 'wb').write(bytes(20 << 20)); import os; os.rename('x', '{kept}/x')"
    run(client, 1, move)
    rest(client)
    # Files that are its project's stay so wherever they are.
    assert quota_of(disk)[2] >= 20 * MIB
    assert_held(run(client, 2, FILL))
    (kept / "x").unlink()
    kept.rmdir()


def test_ready_slot_is_used_for_its_own_kind_of_quota_only(make: Make) -> None:
    client = make(limits=ON_DISK, pool_min=1, pool_max=1, uid_max=UID + 3)
    kind = "import subprocess; subprocess.run(['stat', '-f', '-c', '%T', '.'])"
    assert run(client, 1, kind) == ["ext2/ext3"]
    assert run(client, 2, kind, dataclasses.replace(ON_DISK, memory_max=256 * MIB)) == ["tmpfs"]
    assert run(client, 3, kind) == ["ext2/ext3"]


def test_quota_is_lifted_by_the_spawner_that_took_over(make: Make, disk: Path) -> None:
    client = make()
    client.start(1, ["/bin/sleep", "300"], ON_DISK)
    client.wait_started(1)
    assert is_limited(disk)
    eventually(lambda: children(client.welcome.pid, "standby"))
    kill_now(client.welcome.pid)
    client.reconnect()
    assert is_limited(disk)
    client.cancel(1)
    assert client.wait_ended(1).status is Status.CANCELLED
    eventually(lambda: quota_of(disk) == NOTHING)


def kill_all(client: SpawnerClient) -> None:
    """The spawner and its standby; who waits in a slot ends by itself."""
    (standby,) = eventually(lambda: children(client.welcome.pid, "standby"))
    os.kill(standby, signal.SIGSTOP)
    kill_now(client.welcome.pid)
    kill_now(standby)
    client.socket.close()


def uid_is_free() -> bool:
    """The launcher that waited is gone, and its copy of the lock with it."""
    lock = uids.lock(UID)
    if lock is not None:
        uids.unlock(UID, lock)
    return lock is not None


def test_quota_of_a_dead_spawners_slot_is_lifted_by_the_next_one(make: Make, disk: Path) -> None:
    client = make(limits=ON_DISK, pool_min=1, pool_max=1)
    eventually(lambda: is_limited(disk))
    kill_all(client)
    client.settings = dataclasses.replace(client.settings, pool_min=0, pool_max=0)
    client.connect()
    eventually(lambda: quota_of(disk) == NOTHING)
    assert_held(run(client, 1, FILL))


def test_sweep_leaves_the_quota_of_another_workers_task_with_the_same_uid(
    make: Make, disk: Path
) -> None:
    client = make(limits=ON_DISK, pool_min=1, pool_max=1)
    eventually(lambda: is_limited(disk))
    (left,) = eventually(lambda: os.listdir(client.home / "state/work"))
    kill_all(client)
    other = make()
    eventually(uid_is_free)
    other.start(1, ["/bin/sleep", "300"], ON_DISK)
    other.wait_started(1)
    client.settings = dataclasses.replace(client.settings, pool_min=0, pool_max=0)
    client.connect()
    eventually(lambda: not (client.home / "state/work" / left).exists())
    assert is_limited(disk)
    other.cancel(1)
    other.wait_ended(1)
    eventually(lambda: quota_of(disk) == NOTHING)


def stockade(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(place),
        "STOCKADE_WORKER_STATE_DIR": str(place / "state"),
    }  # fmt: skip
    return subprocess.run(
        [*STOCKADE, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


RUN = (
    "run", "--memory-max", "64M", "--workdir-max", "48M", "--workdir-inodes-max", "40",
    "--runtime-max", "120s",
)  # fmt: skip


@pytest.mark.parametrize("profile", Profile)
def test_run_holds_it_and_says_that_nothing_is_missing(disk: Path, profile: Profile) -> None:
    done = stockade(
        disk, *RUN, "--profile", profile, "--on-unsupported", "refuse", "--json",
        "--", "/usr/bin/python3", "-c", FILL,
    )  # fmt: skip
    assert done.returncode == 0, done
    assert_held(done.stdout.split())
    assert json.loads(done.stderr.splitlines()[-1])["degraded"] == []
    plan = stockade(disk, *RUN, "--plan", "--", "true").stdout
    assert f"a project quota of {48 * MIB} bytes and 40 files" in " ".join(plan.split())


def test_doctor_says_what_holds_it(disk: Path) -> None:
    line = "workdir_max above half of memory_max: "
    assert f"{line}by project quota\n" in stockade(disk, "doctor").stdout
    text = stockade(Path("/var/tmp"), "doctor").stdout
    assert f"{line}not held\n  the file system of /var/tmp does not count by projects" in text
    assert "tune2fs -O project -Q prjquota" in " ".join(text.split())


def test_run_refuses_it_on_a_file_system_without_project_quotas() -> None:
    done = stockade(Path("/var/tmp"), *RUN, "--on-unsupported", "refuse", "--", "true")
    assert done.returncode == 125
    assert "does not count by projects" in done.stderr
    assert "tune2fs -O project -Q prjquota" in done.stderr


# ---- The trial ----


def test_trial_leaves_nothing(disk: Path) -> None:
    before = os.listdir(disk)
    assert quota_probe.obstacle(str(disk)) is None
    assert os.listdir(disk) == before
    assert {quota_of(disk, project) for project in quota_probe._PROJECTS} == {NOTHING}


def test_trials_at_the_same_time_do_not_meet(disk: Path) -> None:
    code = f"from stockade.sandbox.quota_probe import obstacle; print(obstacle({str(disk)!r}))"
    tries = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert [each.communicate(timeout=DEADLINE_S)[0] for each in tries] == ["None\n"] * 6


def test_limits_that_are_not_held_are_found_out() -> None:
    # With the feature but without the mount option, use is counted and nothing is refused.
    with mounted("-O project,quota -E quotatype=prjquota", "") as target:
        found = quota_probe.obstacle(str(target))
    assert found is not None
    assert "could pass its limit" in found[0]
    assert "prjquota" in found[1]


def test_place_in_a_project_of_the_operator_is_not_taken_out_of_it(disk: Path) -> None:
    place = disk / "tenant"
    place.mkdir()
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    quota.set_project(fd, Project(77, inherits=True))
    os.close(fd)
    found = quota_probe.obstacle(str(place))
    place.rmdir()
    assert found is not None
    assert "is in project 77" in found[0]
