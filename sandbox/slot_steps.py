"""Steps that are each slot's own: what its tasks may write, its processes, its network.

They are done in the slot's child, which is no Python process: each is the calls that it makes.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

from stockade.platform import keyring, mounts, net
from stockade.platform.mounts import AT_FDCWD
from stockade.sandbox.system_steps import QUIET, TASK_DIRECTORY, TEMPORARY, WORK
from stockade.sandbox.work_directory import tmpfs_options
from stockade.sandbox.zygote_message import FD_PASSED, Call

# Stands for the slot's name.
SLOT: Final = "{slot}"

# Files cost memory too, which a host without a memory controller does not count.
_INODE_BYTES: Final = 4096
_INODES_LEAST: Final = 1024
_NOTHING: Final = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessTable:
    """A /proc of the slot's pid namespace, in which a uid sees its own processes only."""

    def __str__(self) -> str:
        return "mount a /proc of its own processes"

    def calls(self) -> Iterator[Call]:
        flags = QUIET | mounts.MS_NOEXEC
        yield Call("mount", ("proc", "/proc", "proc", flags, "hidepid=2"))


@dataclasses.dataclass(frozen=True, slots=True)
class Terminals:
    """Pseudo-terminals of its own."""

    def __str__(self) -> str:
        return "mount a /dev/pts of its own"

    def calls(self) -> Iterator[Call]:
        flags = mounts.MS_NOSUID | mounts.MS_NOEXEC
        options = "newinstance,ptmxmode=0666,mode=620"
        yield Call("mount", ("devpts", "/dev/pts", "devpts", flags, options))


@dataclasses.dataclass(frozen=True, slots=True)
class TemporaryDirectories:
    """/tmp and /var/tmp, empty, of one tmpfs that they share; it counts as memory."""

    size_bytes: int | None

    def __str__(self) -> str:
        return f"mount new /tmp and /var/tmp, together {_shown_size(self.size_bytes)}"

    def calls(self) -> Iterator[Call]:
        yield _tmpfs(TEMPORARY, self.size_bytes, 0o700)
        for name, target in (("tmp", "/tmp"), ("var", "/var/tmp")):
            part = f"{TEMPORARY}/{name}"
            yield Call("mkdirat", (AT_FDCWD, part, 0o1777))
            if os.path.isdir(target) and not os.path.islink(target):
                yield _bind(part, target)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """An empty /dev/shm; it counts as memory."""

    size_bytes: int | None

    def __str__(self) -> str:
        return f"mount a new /dev/shm, {_shown_size(self.size_bytes)}"

    def calls(self) -> Iterator[Call]:
        yield _tmpfs("/dev/shm", self.size_bytes, 0o1777)


@dataclasses.dataclass(frozen=True, slots=True)
class ShowAgain:
    """Puts what waits in SHOWN below the temporary directory that is there now."""

    waiting: str
    target: str

    def __str__(self) -> str:
        return f"show {self.target}"

    def calls(self) -> Iterator[Call]:
        parts = self.target.split("/")
        for length in range(2, len(parts)):
            parent = "/".join(parts[:length])
            yield Call("mkdirat", (AT_FDCWD, parent, 0o755), tolerated=(errno.EEXIST,))
        # What waits is what was there when the spawner started.
        if os.path.isdir(self.target):
            yield Call("mkdirat", (AT_FDCWD, self.target, 0o755), tolerated=(errno.EEXIST,))
        else:
            file = (AT_FDCWD, self.target, stat.S_IFREG | 0o644, 0)
            yield Call("mknodat", file, tolerated=(errno.EEXIST,))
        yield _bind(self.waiting, self.target, mounts.MS_REC)


@dataclasses.dataclass(frozen=True, slots=True)
class PassedWorkDirectory:
    """The slot's work directory, passed to the child as a mount that is attached nowhere."""

    def __str__(self) -> str:
        return f"show the work directory as {TASK_DIRECTORY}"

    def calls(self) -> Iterator[Call]:
        flags = mounts.MOVE_MOUNT_F_EMPTY_PATH
        yield Call("move_mount", (FD_PASSED, "", AT_FDCWD, TASK_DIRECTORY, flags))
        yield Call("close", (FD_PASSED,))


@dataclasses.dataclass(frozen=True, slots=True)
class OwnWorkDirectory:
    """The slot's work directory, out of all of them, which the zygote of a user has in WORK."""

    def __str__(self) -> str:
        return f"show the work directory as {TASK_DIRECTORY}"

    def calls(self) -> Iterator[Call]:
        yield _bind(f"{WORK}/{SLOT}", TASK_DIRECTORY)
        yield Call("umount2", (WORK, mounts.MNT_DETACH))


@dataclasses.dataclass(frozen=True, slots=True)
class Loopback:
    """Network interfaces of its own: loopback alone, and up."""

    def __str__(self) -> str:
        return "bring its own loopback up"

    def calls(self) -> Iterator[Call]:
        yield Call("socket", (socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0))
        yield Call("ioctl", (FD_PASSED, net.SIOCSIFFLAGS, net.up_request()))
        yield Call("close", (FD_PASSED,))


@dataclasses.dataclass(frozen=True, slots=True)
class Keyring:
    """A session keyring of its own: keys of whoever started the worker are out of reach."""

    def __str__(self) -> str:
        return "join a new session keyring"

    def calls(self) -> Iterator[Call]:
        join = (keyring.KEYCTL_JOIN_SESSION_KEYRING, _NOTHING)
        yield Call("keyctl", join, tolerated=keyring.ABSENT)


def _tmpfs(target: str, size_bytes: int | None, mode: int) -> Call:
    inodes = None if size_bytes is None else max(_INODES_LEAST, size_bytes // _INODE_BYTES)
    options = tmpfs_options(size_bytes, inodes, mode)
    text = ",".join(f"{key}={value}" for key, value in options.items())
    return Call("mount", ("tmpfs", target, "tmpfs", QUIET, text))


def _bind(source: str, target: str, more: int = 0) -> Call:
    return Call("mount", (source, target, _NOTHING, mounts.MS_BIND | more, _NOTHING))


def _shown_size(size_bytes: int | None) -> str:
    return "as large as the kernel's default" if size_bytes is None else f"{size_bytes} bytes"
