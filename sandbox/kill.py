"""Ending everything in a slot, and seeing that nothing is left.

With a cgroup tree the kernel does both, with a pid namespace the killing. Without either a slot's
processes are found by parentage (the launcher is their subreaper), by session and, with a uid of
the slot's own, by uid.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
from typing import Final, Protocol

from stockade.platform import clone, files, pidfd, proc
from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox.slot_groups import SlotGroups

log = logging.getLogger(__name__)

# A round of kill(-1) in the reaper child; it stops by looking, this only bounds a lost race.
_ROUNDS: Final = 1000
# That see nobody, one after the other, before the witness of parentage is killed.
_LOOKS: Final = 5


class Reach(Protocol):
    """What can find and kill a slot's processes, its launcher apart from them."""

    def members(self) -> list[int]:
        """The pids of the task's processes, the launcher not among them."""

    def kill(self) -> None:
        """SIGKILL to the task's processes; returns without waiting.

        The launcher is left to reap them, to write down how the task ended, and to exit.
        """

    def kill_launcher_too(self) -> None:
        """SIGKILL to everything in the slot: for a launcher that does not exit by itself."""

    def gone(self) -> bool:
        """Whether nothing of the slot lives, the launcher included."""

    def is_left(self) -> bool:
        """Whether the task is seen to have no process, while the launcher may have work to do."""


class TreeReach:
    """By cgroup: cgroup.kill misses nothing."""

    def __init__(self, groups: SlotGroups, controllers: frozenset[str]) -> None:
        self._groups = groups
        self._controllers = controllers

    def members(self) -> list[int]:
        return self._groups.task.procs or []

    def kill(self) -> None:
        self._groups.kill_task(self._controllers)

    def kill_launcher_too(self) -> None:
        self._groups.kill(self._controllers)

    def gone(self) -> bool:
        return _is_empty(self._groups.slot)

    def is_left(self) -> bool:
        return _is_empty(self._groups.task)


def _is_empty(group: Group) -> bool:
    try:
        return not group.populated
    except SyscallError as error:
        # Only an empty group can have been removed.
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return True
        raise


class ScatteredReach:
    """Without a tree: by parentage, session and uid.

    Args:
        launcher_pidfd: the launcher's, closed by its owner; -1 when it is known to be gone.
        session: the task's session, which is its main process's pid; None before it started.
        uid: the slot's own uid; None when tasks share the worker's.
    """

    def __init__(
        self, launcher_pid: int, launcher_pidfd: int, session: int | None, uid: int | None
    ) -> None:
        self._launcher_pid = launcher_pid
        self._launcher_pidfd = launcher_pidfd
        self.session = session
        self._uid = uid

    def members(self) -> list[int]:
        pids = set(proc.descendants(self._launcher_pid))
        # Looked at after that: once it has ended it has no children, and its number may be that of
        # somebody who has.
        if self._launcher_pidfd < 0 or pidfd.has_ended(self._launcher_pidfd):
            pids.clear()
        if self.session is not None:
            pids.update(proc.processes_of_session(self.session))
        if self._uid is not None:
            pids.update(proc.processes_of_uid(self._uid))
        # Never the launcher by this way, and never ourselves, whatever a recycled number says.
        return sorted(pids - {self._launcher_pid, os.getpid()})

    def kill(self) -> None:
        if self._uid is not None:
            try:
                _kill_uid(self._uid)
            except SyscallError as error:
                # Out of processes, which the task itself may have taken: the walk needs none.
                log.warning("cannot kill uid %d at once: %s", self._uid, error)
        # Stop all first: what is stopped forks no more, so the second look misses less. Nor does it
        # end by itself, so its number stays its own: it is killed also when that look misses it.
        # One whose parent has just ended is below nobody for a moment.
        stopped = [pid for pid in self.members() if pidfd.checked_kill(pid, signal.SIGSTOP)]
        for pid in sorted({*stopped, *self.members()}):
            pidfd.checked_kill(pid, signal.SIGKILL)

    def kill_launcher_too(self) -> None:
        self.kill()
        # Last, since it is by their parentage that most of them are found; and one that forks for
        # ever is missed by a look now and then.
        if self._launcher_pidfd >= 0 and not any(self.members() for _ in range(_LOOKS)):
            pidfd.send_signal(self._launcher_pidfd, signal.SIGKILL)

    def gone(self) -> bool:
        if self._launcher_pidfd < 0:
            return not self.members()
        # Not by pid, which could be somebody else's by now.
        return pidfd.has_ended(self._launcher_pidfd) and not self.members()

    def is_left(self) -> bool:
        # One that forks for ever may just not be seen; the launcher, when it is gone, saw its end.
        return False


class InitReach(ScatteredReach):
    """Without a tree, but with a pid namespace whose init the launcher is: it takes all with it."""

    def kill_launcher_too(self) -> None:
        if self._launcher_pidfd >= 0:
            pidfd.send_signal(self._launcher_pidfd, signal.SIGKILL)


def _kill_uid(uid: int) -> None:
    """Kills all of a uid's processes, also ones that fork, exit and setsid for ever.

    A child becomes the uid and signals -1 until it sees nobody else: the kernel then delivers to
    every process at once, which no walk over pids can do. It returns 0 even when nobody was left,
    so the child looks.
    """
    pid, child = clone.clone3(0)
    if pid == 0:
        try:
            # Nothing of ours for the task, whose uid it gets.
            files.close_all_but()
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            for _ in range(_ROUNDS):
                pidfd.kill_everything_of_uid(uid)
                if all(other == os.getpid() for other in proc.processes_of_uid(uid)):
                    break
        finally:
            os._exit(0)
    try:
        os.waitid(os.P_PIDFD, child, os.WEXITED)
    finally:
        os.close(child)
