"""Who is found, who is killed and when all are seen to be gone, with and without a tree."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from spawner_client import eventually

from stockade.platform import cgroup, clone, pidfd, proc
from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox.capabilities import probe
from stockade.sandbox.ceiling import Ceiling
from stockade.sandbox.kill import InitReach, ScatteredReach, TreeReach
from stockade.sandbox.limits import Ceilings, Limits
from stockade.sandbox.slot_groups import SlotGroups

UID = 1879048192 + 4343
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a uid of the slot's own")
needs_tree = pytest.mark.skipif(
    os.geteuid() != 0 or not probe().has_cgroup_kill, reason="needs a cgroup v2 tree of its own"
)
# A main process, a job of its session, and a daemon that left that.
SCRIPT = "setsid sleep 98800 & sleep 98801 & exec sleep 98802"
COMET = "import os\nwhile 1:\n  if os.fork(): os._exit(0)\n  os.setsid()"

# Does of a launcher what is needed here: starts the task, adopts and reaps, and stays.
LAUNCHER = """
import os, signal, subprocess, sys
from stockade.platform import prctl
prctl.set_child_subreaper()
uid = int(sys.argv[1])
own = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
print(subprocess.Popen(sys.argv[2:], start_new_session=True, **own).pid, flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        signal.pause()
"""


class Launched:
    """A stand-in for a launcher, with a task."""

    def __init__(self, argv: list[str], uid: int | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(uid or 0), *argv],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.pidfd = pidfd.open_pidfd(self.pid)
        self.uid = uid
        self.task = 0
        self.started: list[int] = []

    def wait_until_started(self) -> None:
        assert self.process.stdout is not None
        self.task = int(self.process.stdout.readline())
        self.started = [self.task]

    def wait_until_all_run(self) -> None:
        """Three processes of SCRIPT, each its own program by now."""
        self.started = eventually(
            lambda: found if len(found := proc.descendants(self.pid)) == 3 else []
        )
        eventually(lambda: all(name_of(pid) == "sleep" for pid in self.started))

    def end(self) -> None:
        for pid in (self.pid, *self.started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.uid is not None:
            # Also what no look would catch, should a test have failed.
            subprocess.run(
                ["/bin/kill", "-KILL", "-1"],
                user=self.uid, group=self.uid, extra_groups=[], check=False,
            )  # fmt: skip
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self.pidfd)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as file:
        return file.read().strip()
    return ""


def arguments_of(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        with open(f"/proc/{pid}/cmdline", encoding="ascii") as file:
            found.add(file.read().split("\0")[1])
    return found


def lives(pid: int) -> bool:
    found = proc.process(pid)
    return found is not None and found.is_alive


def lives_on(pid: int) -> bool:
    """Whether a process that was sent no SIGKILL lives; one that was has a moment to end."""
    time.sleep(0.2)
    return lives(pid)


Launch = Callable[..., Launched]


@pytest.fixture
def launch() -> Iterator[Launch]:
    made: list[Launched] = []

    def start(uid: int | None = None, argv: list[str] | None = None) -> Launched:
        launched = Launched(argv or ["bash", "-c", SCRIPT], uid)
        made.append(launched)
        launched.wait_until_started()
        if argv is None:
            launched.wait_until_all_run()
        return launched

    yield start
    for launched in made:
        launched.end()


def test_below_a_launcher_all_are_found_and_killed_and_it_goes_last(launch: Launch) -> None:
    slot = launch()
    reach = ScatteredReach(slot.pid, slot.pidfd, None, None)
    assert arguments_of(reach.members()) == {"98800", "98801", "98802"}
    assert not reach.gone()
    reach.kill()
    eventually(lambda: not reach.members())
    # It has still to write down how the task ended.
    assert not pidfd.has_ended(slot.pidfd)
    assert not reach.gone()
    # Nothing seen is no proof here: something that forks for ever may be missed.
    assert not reach.is_left()
    reach.kill_launcher_too()
    eventually(reach.gone)
    assert pidfd.has_ended(slot.pidfd)
    assert not reach.is_left()


def test_launcher_that_does_not_exit_is_killed_with_all_that_is_left(launch: Launch) -> None:
    slot = launch()
    reach = ScatteredReach(slot.pid, slot.pidfd, slot.task, None)

    def is_done() -> bool:
        reach.kill_launcher_too()
        return reach.gone()

    eventually(is_done)
    assert not any(proc.process(pid) for pid in slot.started)


def test_launcher_outlives_what_could_not_be_killed(launch: Launch) -> None:
    class Powerless(ScatteredReach):
        def kill(self) -> None:
            """As with a task in uninterruptible sleep."""

    slot = launch()
    Powerless(slot.pid, slot.pidfd, slot.task, None).kill_launcher_too()
    # By its parentage they are found again.
    assert lives_on(slot.pid)


def test_all_are_stopped_before_the_first_is_killed(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = launch()
    sent: list[int] = []

    def send(pid: int, number: int) -> bool:
        sent.append(number)
        return checked_kill(pid, number)

    checked_kill = pidfd.checked_kill
    monkeypatch.setattr(pidfd, "checked_kill", send)
    ScatteredReach(slot.pid, slot.pidfd, slot.task, None).kill()
    assert sent == [signal.SIGSTOP] * 3 + [signal.SIGKILL] * 3


def test_what_was_stopped_is_killed_also_when_the_next_look_misses_it(launch: Launch) -> None:
    class Blinking(ScatteredReach):
        looks = 0

        def members(self) -> list[int]:
            self.looks += 1
            return super().members() if self.looks == 1 else []

    slot = launch()
    Blinking(slot.pid, slot.pidfd, slot.task, None).kill()
    eventually(lambda: not any(lives(pid) for pid in slot.started))


def test_launcher_outlives_what_a_look_misses_now_and_then(launch: Launch) -> None:
    class Flickering(ScatteredReach):
        looks = 0

        def kill(self) -> None:
            """As with a process that has forked again by the time of the signal."""

        def members(self) -> list[int]:
            self.looks += 1
            return super().members() if self.looks % 3 == 0 else []

    slot = launch()
    Flickering(slot.pid, slot.pidfd, slot.task, None).kill_launcher_too()
    assert lives_on(slot.pid)


@pytest.mark.parametrize(
    ("uid", "found"),
    [
        (None, {"98801", "98802"}),
        pytest.param(UID, {"98800", "98801", "98802"}, marks=needs_root),
    ],
)
def test_without_its_launcher_a_task_is_found_by_its_session_and_its_uid(
    launch: Launch, uid: int | None, found: set[str]
) -> None:
    slot = launch(uid)
    slot.process.kill()
    slot.process.wait()
    reach = ScatteredReach(slot.pid, -1, slot.task, uid)
    assert arguments_of(reach.members()) == found
    assert not reach.gone()
    reach.kill_launcher_too()
    eventually(reach.gone)
    assert not reach.members()


def test_children_of_who_has_the_number_of_a_launcher_that_is_gone_are_not_the_tasks(
    launch: Launch,
) -> None:
    innocent = launch()
    gone = subprocess.Popen(["true"])
    ended = pidfd.open_pidfd(gone.pid)
    gone.wait()
    for fd in (-1, ended):
        reach = ScatteredReach(innocent.pid, fd, None, None)
        reach.kill()
        assert reach.gone()
    os.close(ended)
    assert all(map(lives_on, innocent.started))


def test_ended_launcher_is_not_all_that_has_to_be_gone(launch: Launch) -> None:
    slot = launch()
    reach = ScatteredReach(slot.pid, slot.pidfd, slot.task, None)
    slot.process.kill()
    slot.process.wait()
    assert not reach.gone()
    reach.kill()
    eventually(reach.gone)


def test_neither_we_nor_the_launcher_are_ever_members(launch: Launch) -> None:
    slot = launch()
    # As if the kernel had given our session the number of the task's.
    reach = ScatteredReach(slot.pid, slot.pidfd, os.getsid(0), None)
    assert {os.getpid(), slot.pid} <= set(proc.processes_of_session(os.getsid(0)))
    assert {os.getpid(), slot.pid}.isdisjoint(reach.members())


@needs_root
def test_what_forks_and_leaves_its_session_for_ever_dies_by_its_uid(launch: Launch) -> None:
    four = 'for _ in 1 2 3 4; do /usr/bin/python3 -c "$0" & done'
    slot = launch(UID, ["bash", "-c", four, COMET])
    reach = ScatteredReach(slot.pid, slot.pidfd, slot.task, UID)

    def flies() -> bool:
        found = proc.processes_of_uid(UID)
        return bool(found) and slot.task not in found

    eventually(flies)
    reach.kill()
    assert proc.processes_of_uid(UID) == []
    assert not pidfd.has_ended(slot.pidfd)


@needs_root
def test_tasks_of_a_uid_are_killed_also_when_no_process_can_be_made_for_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_flags: int) -> NoReturn:
        raise SyscallError("clone3", "", errno.EAGAIN)

    slot = launch(UID)
    monkeypatch.setattr(clone, "clone3", refuse)
    ScatteredReach(slot.pid, slot.pidfd, slot.task, UID).kill()
    eventually(lambda: not any(map(lives, slot.started)))


def test_launcher_that_is_init_takes_all_with_it_and_is_killed_at_once(launch: Launch) -> None:
    slot = launch()
    reach = InitReach(slot.pid, slot.pidfd, slot.task, None)
    reach.kill_launcher_too()
    eventually(lambda: pidfd.has_ended(slot.pidfd))
    # No namespace here: by this way nobody else was killed.
    assert slot.task in reach.members()
    # One that is known to be gone is not signalled.
    InitReach(slot.pid, -1, slot.task, None).kill_launcher_too()


@pytest.fixture
def groups() -> Iterator[SlotGroups]:
    mount = cgroup.find_mount()
    assert mount is not None
    path = mount / f"stockade-test-kill-{os.getpid()}"
    ceiling = Ceiling(Group(mount), Ceilings(), frozenset())
    groups = SlotGroups(path, ceiling, disk=None, counts_peak=False)
    groups.create(frozenset(), Limits())
    yield groups
    with contextlib.suppress(OSError):
        groups.slot.kill()
        eventually(lambda: not groups.populated)
        groups.remove()


@needs_tree
def test_with_a_tree_the_task_goes_first_then_the_launcher_then_the_groups(
    launch: Launch, groups: SlotGroups
) -> None:
    slot = launch()
    groups.init.attach(slot.pid)
    for pid in slot.started:
        groups.task.attach(pid)
    reach = TreeReach(groups, frozenset())
    assert sorted(reach.members()) == sorted(slot.started)
    assert not reach.is_left()
    reach.kill()
    eventually(reach.is_left)
    assert reach.members() == []
    assert not reach.gone()
    assert not pidfd.has_ended(slot.pidfd)
    reach.kill_launcher_too()
    eventually(reach.gone)
    groups.remove()
    # Only an empty group can have been removed.
    assert reach.gone()
    assert reach.is_left()
    assert reach.members() == []


def test_what_cannot_be_read_is_not_taken_for_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ceiling = Ceiling(Group(tmp_path), Ceilings(), frozenset())
    groups = SlotGroups(tmp_path / "file" / "slot", ceiling, disk=None, counts_peak=False)
    with pytest.raises(SyscallError, match="ENOTDIR"):
        TreeReach(groups, frozenset()).gone()
