"""The clean-up after tasks, and the sweep of their uids, on a host that is in their way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from injection import Fault, attached, needs_strace
from python_process import run_python
from spawner_client import SpawnerClient, eventually

from stockade.platform import mounts
from stockade.sandbox.outcome import Status

FIRST = 1879046000
USABLE = 8


@needs_strace
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tasks get uids of their own")
def test_uids_that_could_not_be_swept_are_swept_later() -> None:
    # The first one is the launchers'.
    client = SpawnerClient(uid_min=FIRST, uid_max=FIRST + USABLE)
    try:
        seq = 0
        with attached(client.welcome.pid, Fault("clone3", 1, "EAGAIN", times=60000)):
            for seq in range(1, 2 * USABLE):
                outcome, _ = client.run(seq, "true")
                if outcome.status is not Status.SUCCESS:
                    break
            assert "cannot give the task a uid" in outcome.reason
        for later in range(seq + 1, seq + 2 * USABLE):
            assert client.run(later, "echo on")[1] == b"on\n"
    finally:
        client.close()


@needs_strace
def test_slot_for_whose_clean_up_no_process_can_be_made_is_cleaned_up_later() -> None:
    client = SpawnerClient(pool_min=0, pool_max=0)
    work = client.home / "state/work"
    try:
        with attached(client.welcome.pid, Fault("clone3", 1, "EAGAIN", times=60000)) as strace:
            client.run(1, "mkdir d && : > d/file")
            eventually(lambda: strace.fired)
            assert len(os.listdir(work)) == 1
        eventually(lambda: not os.listdir(work))
    finally:
        client.close()


@pytest.mark.skipif(
    os.geteuid() != 0
    or not os.path.isdir("/run/lock")
    or not os.stat("/run/lock").st_mode & stat.S_IWOTH,
    reason="needs root, and a /run/lock that all may write",
)
def test_what_a_task_leaves_among_the_hosts_locks_is_swept() -> None:
    left = Path(f"/run/lock/stockade-test-{os.getpid()}")
    client = SpawnerClient()
    try:
        assert client.run(1, f": > {left} && echo made")[1] == b"made\n"
        # What is to be swept is swept before it ends.
        client.close()
        assert not left.exists()
    finally:
        left.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tasks get uids of their own")
def test_what_a_dead_spawners_tasks_left_is_swept_before_their_uids_serve_again() -> None:
    left = Path(f"/tmp/stockade-test-left-{os.getpid()}")
    left.touch(mode=0o600)
    # As the only task uid, the first task would get it.
    os.chown(left, FIRST + 1, FIRST + 1)
    client = SpawnerClient(uid_min=FIRST, uid_max=FIRST + 1, pool_min=0, pool_max=0)
    try:
        outcome, output = client.run(1, f"id -u; [ -e {left} ] || echo swept")
        assert (outcome.status, output) == (Status.SUCCESS, f"{FIRST + 1}\nswept\n".encode())
    finally:
        client.close()
        left.unlink(missing_ok=True)


SWEEP = """
import sys
from stockade.platform import keyring
from stockade.sandbox import uid_sweep

uid_sweep.DIRECTORIES = (sys.argv[1],)
keyring.join_new_session()
left = uid_sweep.sweep({int(sys.argv[2])})
assert left == {}, left
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")
@pytest.mark.parametrize("option", ["", ",allow_other"])
def test_what_another_user_mounted_where_tasks_write_stops_no_sweep(
    place: Path, option: str
) -> None:
    # With allow_other each look at it waits for an answer of its server, which gives none.
    of_task, theirs = place / "of-task", place / "theirs"
    place.chmod(0o1777)
    of_task.touch()
    os.chown(of_task, FIRST, FIRST)
    theirs.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=1234,group_id=1234{option}"
    mounts.mount("none", theirs, "fuse", 0, options)
    try:
        if not option:
            with pytest.raises(PermissionError):
                theirs.lstat()
        run_python(SWEEP, str(place), str(FIRST))
        assert not of_task.exists()
    finally:
        mounts.unmount(theirs, mounts.MNT_DETACH)
        os.close(server)


@needs_root
def test_what_one_task_hid_in_the_directory_of_another_goes_with_that(place: Path) -> None:
    place.chmod(0o1777)
    first, second = place / "first", place / "first/second"
    first.mkdir()
    second.mkdir(mode=0o700)
    (second / "file").touch(mode=0o600)
    first.chmod(0o777)
    os.chown(first, FIRST, FIRST)
    os.chown(second, FIRST + 1, FIRST + 1)
    elsewhere = place.parent / f"{place.name}-elsewhere"
    elsewhere.write_text("not theirs")
    (first / "link").symlink_to(elsewhere)
    try:
        run_python(SWEEP, str(place), str(FIRST))
        assert not first.exists()
        assert elsewhere.read_text() == "not theirs"
    finally:
        elsewhere.unlink()


SWEEP_UNTIL_FREE = """
import sys, time
from pathlib import Path
from stockade.platform import mounts
from stockade.sandbox import uid_sweep
from stockade.sandbox.loop import Loop
from stockade.sandbox.uids import UidPool

place, uid = Path(sys.argv[1]), int(sys.argv[2])
uid_sweep.DIRECTORIES = (str(place),)
uid_sweep._WAIT_S = uid_sweep._SPOILED_S = 0.1
loop, uids = Loop(), UidPool(uid - 1, uid, place / "locks")
uid_sweep.UidSweeper(loop, uids)
looks = 0

def look():
    global looks
    looks += 1
    if looks == 10:
        assert uids.size == 1 and not uids._free, "it is used while something of it is left"
        mounts.unmount(place / "left/mounted")
    if uids._free:
        loop.stop()
    else:
        loop.call_later(0.1, look)

taken, lock = uids.take()
uids.give_back(taken, lock)
loop.call_later(0.1, look)
loop.run()
assert looks > 10
"""


@needs_root
def test_uid_of_which_a_sweep_left_something_serves_again_once_that_is_gone(place: Path) -> None:
    place.chmod(0o1777)
    mounted = place / "left/mounted"
    mounted.mkdir(parents=True)
    os.chown(place / "left", FIRST, FIRST)
    mounts.mount("none", mounted, "tmpfs", 0, "")
    try:
        run_python(SWEEP_UNTIL_FREE, str(place), str(FIRST))
        assert not (place / "left").exists()
    finally:
        if mounted.is_mount():
            mounts.unmount(mounted, mounts.MNT_DETACH)
