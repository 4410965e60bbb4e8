"""Removes what a task left behind, whatever it is.

What a task can leave: directories without permissions, trees deeper than any recursion, descriptor
table or PATH_MAX, millions of files in one directory, names that are no text, symlinks that lead
out, files that attributes protect, mounts. So the walk below

- knows every directory by descriptor only and never follows a symlink or crosses a mount point;
- holds two descriptors at any depth: it goes up by ``..`` and checks that it came where it was;
- remembers at most MAX_REMEMBERED names of subdirectories, however many there are, and one name
  and inode number a level;
- goes on past what cannot be removed, and tells it at the end.

A large tree takes long: run it outside any loop that others wait for.
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from typing import Final

from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.unprotect import open_within, unprotect, unprotect_file

MAX_REMEMBERED: Final = 4096
_MAX_RESCANS: Final = 1000
_MAX_TOLD: Final = 8
_MAX_TOLD_BYTES: Final = 200
_PROTECTED: Final = (errno.EPERM, errno.EACCES)
_NOT_EMPTY: Final = (errno.ENOTEMPTY, errno.EEXIST)


def remove_tree(parent_fd: int, name: bytes) -> None:
    """Removes ``name`` under the directory ``parent_fd`` and everything in it.

    Nothing but that entry and what is below it, on the same mount, is touched; a symlink or a file
    of that name is itself removed. When there is none, all is done. The tree's processes must be
    gone: what they add meanwhile may stay, and is told then.

    Args:
        parent_fd: an open directory (not O_PATH) that only we, or those we trust, can change.
        name: one name, without a slash.

    Raises:
        ValueError: ``name`` is not one name.
        SandboxSetupError: something is left; the message names some of it and says why.
            Everything else was removed.
    """
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise ValueError(f"cannot remove {name!r}: it is not one name")
    left = _Walk(parent_fd).run(name)
    if left:
        raise SandboxSetupError(f"remove directory {name!r}", f"left: {'; '.join(left)}")


class _Scan(enum.Enum):
    """How far the last reading of a directory came."""

    NONE = enum.auto()
    PART = enum.auto()
    WHOLE = enum.auto()


class _Level:
    """A directory on the way from the top down to where the walk is."""

    __slots__ = ("failures", "identity", "name", "pending", "removed", "rescans", "scan")

    def __init__(self, name: bytes, identity: tuple[int, int]) -> None:
        self.name = name
        self.identity = identity
        self.scan = _Scan.NONE
        self.pending: list[bytes] = []  # subdirectories that the last scan met, not yet entered
        self.removed = 0  # entries removed since the last scan began
        self.failures = 0  # entries met since then that cannot be removed
        self.rescans = 0


class _Walk:
    """One removal: where it is, and what it had to leave."""

    def __init__(self, parent_fd: int) -> None:
        self._parent_fd = parent_fd
        self._fd = os.dup(parent_fd)  # the lowest level's directory
        self._levels: list[_Level] = []
        self._remembered = 0  # names in the pending of all levels
        self._left: list[str] = []

    def run(self, name: bytes) -> list[str]:
        """Removes the entry as far as it can be; gives what is left of it, with the reasons."""
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                self._enter(name)
                while self._levels:
                    self._step()
            else:
                self._unlink(name)
        except FileNotFoundError:
            pass
        finally:
            os.close(self._fd)
        return self._left

    def _step(self) -> None:
        """One move in the lowest level."""
        level = self._levels[-1]
        if level.pending:
            self._remembered -= 1
            self._enter(level.pending.pop())
        elif level.scan is _Scan.WHOLE:
            self._go_up()
        elif level.scan is _Scan.PART and not level.removed:
            # As many as we may remember cannot be removed; the next scan would meet them again.
            self._leave(b"*", "not reached, too many before it cannot be removed")
            self._go_up()
        else:
            self._scan(level)

    def _scan(self, level: _Level) -> None:
        """Removes files and empty directories, and remembers the other directories."""
        level.removed = level.failures = 0
        level.scan = _Scan.WHOLE
        try:
            os.lseek(self._fd, 0, os.SEEK_SET)  # scandir would go on where the last one stopped
            with os.scandir(self._fd) as entries:
                for entry in entries:
                    name = os.fsencode(entry.name)
                    if not entry.is_dir(follow_symlinks=False):
                        self._unlink(name)
                    elif _is_removed_when_empty(self._fd, name):
                        level.removed += 1
                    elif level.pending and self._remembered >= MAX_REMEMBERED:
                        level.scan = _Scan.PART
                        break
                    else:
                        level.pending.append(name)
                        self._remembered += 1
        except OSError as error:
            self._leave(b"*", error)

    def _enter(self, name: bytes) -> None:
        """Makes a subdirectory the lowest level, with every permission for its owner."""
        try:
            below = open_within(self._fd, name)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self._leave(name, "a mount point" if error.errno == errno.EXDEV else error)
            return
        self._levels.append(_Level(name, _identity(below)))
        self._move_to(below)

    def _go_up(self) -> None:
        """Removes the lowest level's directory and leaves it; stays when it is not empty yet."""
        level = self._levels[-1]
        above = self._open_above()
        reason: OSError | None = None
        if not level.failures:
            try:
                self._rmdir(above, level.name)
            except OSError as error:
                if error.errno in _NOT_EMPTY and level.rescans < _MAX_RESCANS:
                    # Reading a directory while it shrinks may skip entries, readdir(3).
                    level.rescans += 1
                    level.scan = _Scan.NONE
                    os.close(above)
                    return
                reason = error
        self._levels.pop()
        self._move_to(above)
        if reason is not None:
            self._leave(level.name, reason)
        elif self._levels and level.failures:
            self._levels[-1].failures += 1
        elif self._levels:
            self._levels[-1].removed += 1

    def _open_above(self) -> int:
        """The directory above the lowest level's; an error when it is not where we came from."""
        if len(self._levels) == 1:
            return os.dup(self._parent_fd)
        above = os.open(b"..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        if _identity(above) != self._levels[-2].identity:
            os.close(above)
            raise SandboxSetupError(
                f"remove directory {self._levels[0].name!r}",
                f"{self._told(b'')} was moved meanwhile: some process still works in it",
            )
        return above

    def _unlink(self, name: bytes) -> None:
        """Removes an entry that is no directory, and its protection when need be."""
        try:
            try:
                os.unlink(name, dir_fd=self._fd)
            except OSError as error:
                if error.errno not in _PROTECTED:
                    raise
                if self._levels:  # never the parent that we were given
                    unprotect(self._fd)
                unprotect_file(self._fd, name)
                os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return
        except OSError as error:
            self._leave(name, error)
            return
        if self._levels:
            self._levels[-1].removed += 1

    def _rmdir(self, above: int, name: bytes) -> None:
        try:
            os.rmdir(name, dir_fd=above)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in _PROTECTED:
                raise
            unprotect(self._fd)
            if len(self._levels) > 1:
                unprotect(above)
            os.rmdir(name, dir_fd=above)

    def _leave(self, name: bytes, reason: str | OSError) -> None:
        """Notes that an entry of the lowest level cannot be removed."""
        if self._levels:
            self._levels[-1].failures += 1
        why = reason.strerror if isinstance(reason, OSError) else reason
        told = f"{self._told(name)} ({why})"
        if told in self._left:  # met again by a later scan
            return
        if len(self._left) < _MAX_TOLD:
            self._left.append(told)
        else:
            self._left[_MAX_TOLD:] = ["and more"]

    def _told(self, name: bytes) -> str:
        """A path for people: its end, when it is long."""
        parts: list[bytes] = [name] if name else []
        length = len(name)
        for level in reversed(self._levels):
            length += len(level.name) + 1
            if length > _MAX_TOLD_BYTES:
                parts.append(b"...")
                break
            parts.append(level.name)
        return repr(b"/".join(reversed(parts)))[1:]

    def _move_to(self, fd: int) -> None:
        os.close(self._fd)
        self._fd = fd


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _is_removed_when_empty(fd: int, name: bytes) -> bool:
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError:
        return False  # why shows when it is entered
    return True
