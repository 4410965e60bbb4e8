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


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)
def test_what_another_user_mounted_where_tasks_write_stops_no_sweep(place: Path) -> None:
    of_task, theirs = place / "of-task", place / "theirs"
    place.chmod(0o1777)
    of_task.touch()
    os.chown(of_task, FIRST, FIRST)
    theirs.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=1234,group_id=1234"
    mounts.mount("none", theirs, "fuse", 0, options)
    try:
        with pytest.raises(PermissionError):
            theirs.lstat()
        run_python(SWEEP, str(place), str(FIRST))
        assert not of_task.exists()
    finally:
        mounts.unmount(theirs, mounts.MNT_DETACH)
        os.close(server)
