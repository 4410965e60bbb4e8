"""Uids for slots: one each, so that tasks cannot reach one another, locked across all workers."""

from __future__ import annotations

import collections
import fcntl
import logging
import os
import pwd
from pathlib import Path
from typing import Final

from stockade.sandbox.errors import SandboxSetupError

log = logging.getLogger(__name__)

# One place for all workers of the host, whatever their runtime directories.
LOCKS: Final = Path("/run/stockade/uids")
# The first uid of the range is the launchers': they run our code only and need none of their own.
RESERVED: Final = 1


class UidPool:
    """Hands out uids of the range in turn; a uid is locked by a file while anything holds it.

    The launcher inherits the lock's descriptor: the lock outlives a spawner that crashes for as
    long as the launcher lives.
    """

    def __init__(self, first: int, last: int, directory: Path = LOCKS) -> None:
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
        self._free = collections.deque(range(first + RESERVED, last + 1))
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._directory_fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def take(self) -> tuple[int, int]:
        """A uid nobody else holds, and the descriptor that locks it.

        Taken in turn, so that a uid rests for as long as possible before its next task.

        Raises:
            SandboxSetupError: every uid of the range is in use.
        """
        for _ in range(len(self._free)):
            uid = self._free.popleft()
            lock_fd = self._lock(uid)
            if lock_fd is not None:
                return uid, lock_fd
            self._free.append(uid)
        raise SandboxSetupError(
            "give the task a uid", "all uids of the range are in use: widen uid_min to uid_max"
        )

    def _lock(self, uid: int) -> int | None:
        name = str(uid)
        fd = os.open(
            name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600,
            dir_fd=self._directory_fd,
        )  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder removes the file: a lock on a removed one locks nothing.
            if os.fstat(fd).st_ino == os.stat(name, dir_fd=self._directory_fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return None

    def adopt(self, uid: int) -> None:
        """Takes a uid that a task of an earlier spawner has."""
        try:
            self._free.remove(uid)
        except ValueError:
            log.warning("uid %d of an adopted task is not in the range", uid)

    def give_back(self, uid: int, lock_fd: int | None) -> None:
        """The slot's clean-up was seen to be complete: the uid may serve again."""
        if lock_fd is not None:
            os.unlink(str(uid), dir_fd=self._directory_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_UN)
            os.close(lock_fd)
        self._free.append(uid)
