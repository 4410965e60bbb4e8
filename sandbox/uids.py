"""Uids for slots: one each, so that tasks cannot reach one another, locked across all workers."""

from __future__ import annotations

import collections
import logging
import os
import pwd
from collections.abc import Callable, Container
from pathlib import Path
from typing import Final

from stockade.platform import locks
from stockade.sandbox.errors import SandboxSetupError

log = logging.getLogger(__name__)

# One file for all workers, a byte for each uid of the host, whatever their runtime directories.
LOCKS: Final = Path("/run/stockade/uids")
# The first uid of the range is the launchers': they run our code only and need none of their own.
RESERVED: Final = 1


def make_lock_file(path: Path = LOCKS) -> None:
    """Makes it where it is not there yet; nothing removes it.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(path, flags, 0o600))


def lock(uid: int, path: Path = LOCKS) -> int | None:
    """The descriptor that locks the uid for as long as it or a copy is open; None: it is locked.

    Raises:
        OSError: there is no such file.
    """
    # An open file description for each lock: its copy in the launcher keeps it.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if locks.lock_byte(fd, uid):
        return fd
    os.close(fd)
    return None


def unlock(uid: int, lock_fd: int) -> None:
    """Gives the uid up, whoever holds copies of the descriptor, and closes it."""
    locks.unlock_byte(lock_fd, uid)
    os.close(lock_fd)


class UidPool:
    """Hands out uids of the range in turn; a uid is locked while anything holds it.

    The launcher inherits the lock's descriptor: the lock outlives a spawner that crashes for as
    long as the launcher lives.
    """

    def __init__(self, first: int, last: int, path: Path = LOCKS) -> None:
        if last - first < RESERVED:
            raise SandboxSetupError(
                "give tasks uids", f"uid range {first} to {last} is too small: raise uid_max"
            )
        taken = [entry for entry in pwd.getpwall() if first <= entry.pw_uid <= last]
        if taken:
            raise SandboxSetupError(
                "give tasks uids",
                f"uid range {first} to {last} holds the account {taken[0].pw_name!r}: "
                "choose a uid_min and uid_max that no account uses",
            )
        self.launcher_uid = first
        self.size = last - first + 1 - RESERVED
        # Back from a task, still locked, and not to be taken before they were swept.
        self.used: dict[int, int] = {}
        # Of these a sweep is under way.
        self.swept: dict[int, int] = {}
        # Those of which a sweep left something.
        self._spoiled: dict[int, int] = {}
        self.on_used: Callable[[], None] = lambda: None
        # Returns when whatever can be freed is.
        self.on_exhausted: Callable[[], None] = lambda: None
        # Takes note of who died with a uid, before one is looked for.
        self.before_take: Callable[[], None] = lambda: None
        self._free = collections.deque(range(first + RESERVED, last + 1))
        make_lock_file(path)
        self._path = path

    def take(self) -> tuple[int, int]:
        """A uid nobody else holds, and the descriptor that locks it.

        Taken in turn, so that a uid rests for as long as possible before its next task.

        Raises:
            SandboxSetupError: every uid of the range is in use.
            OSError: no descriptor is left.
        """
        self.before_take()
        if not self._free:
            self.on_exhausted()
        for _ in range(len(self._free)):
            self._free.rotate(-1)
            uid = self._free[-1]
            # It stays with the free ones where that fails for want of a descriptor.
            lock_fd = lock(uid, self._path)
            if lock_fd is not None:
                self._free.pop()
                return uid, lock_fd
        raise SandboxSetupError(
            "give the task a uid", "all uids of the range are in use: widen uid_min to uid_max"
        )

    def adopt(self, uid: int) -> None:
        """Takes a uid that a task of an earlier spawner has."""
        try:
            self._free.remove(uid)
        except ValueError:
            log.warning("uid %d of an adopted task is not in the range", uid)

    def adopt_dead(self, uid: int) -> int | None:
        """The same of a task whose launcher is gone, and with it perhaps the last who locked it.

        Returns:
            The descriptor that locks it; None: another spawner has given it to a task of its own.
        """
        lock_fd = lock(uid, self._path)
        if lock_fd is not None:
            self.adopt(uid)
        return lock_fd

    def give_back(self, uid: int, lock_fd: int | None) -> None:
        """The slot's clean-up was seen to be complete: the uid may serve again, once swept.

        ``lock_fd``: None, it was the launcher's alone.
        """
        if lock_fd is None:
            lock_fd = lock(uid, self._path)
        if lock_fd is None:
            # In use again, by a task of another spawner, which has it swept.
            self._free.append(uid)
            return
        self.used[uid] = lock_fd
        self.on_used()

    def reclaim(self, uid: int) -> None:
        """The same for one that nobody gave back, unless it is another's or in use."""
        if uid not in self._free:
            return
        lock_fd = lock(uid, self._path)
        if lock_fd is not None:
            self._free.remove(uid)
            self.used[uid] = lock_fd
            self.on_used()

    def give_back_unused(self, uid: int, lock_fd: int) -> None:
        """No task ever had it."""
        unlock(uid, lock_fd)
        self._free.append(uid)

    def begin_sweep(self) -> None:
        """The used ones, until ``end_sweep``; what comes back meanwhile is for the next sweep."""
        self.swept, self.used = self.used, {}

    def end_sweep(self, spoiled: Container[int]) -> None:
        """Those that were swept serve again, but the ``spoiled`` ones, which stay locked."""
        for uid, lock_fd in self.swept.items():
            if uid in spoiled:
                self._spoiled[uid] = lock_fd
                continue
            unlock(uid, lock_fd)
            self._free.append(uid)
        self.swept = {}

    def sweep_spoiled(self) -> None:
        """Those that could not be swept are to be swept with the used ones once more."""
        if self._spoiled:
            self.used |= self._spoiled
            self._spoiled = {}
            self.on_used()
