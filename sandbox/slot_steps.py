"""Steps that are each slot's own: what its tasks may write, its processes, its network."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import Final

from stockade.platform import keyring, mounts, net
from stockade.sandbox.steps import Kept, make_mount_point
from stockade.sandbox.system_steps import QUIET, TASK_DIRECTORY, TEMPORARY
from stockade.sandbox.work_directory import tmpfs_options

# Files cost memory too, which a host without a memory controller does not count.
_INODE_BYTES: Final = 4096
_INODES_LEAST: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessTable:
    """A /proc of the slot's pid namespace, in which a uid sees its own processes only."""

    def __str__(self) -> str:
        return "mount a /proc of its own processes"

    def apply(self, _kept: Kept) -> None:
        flags = QUIET | mounts.MS_NOEXEC
        mounts.mount("proc", "/proc", "proc", flags, "hidepid=2")


@dataclasses.dataclass(frozen=True, slots=True)
class Terminals:
    """Pseudo-terminals of its own."""

    def __str__(self) -> str:
        return "mount a /dev/pts of its own"

    def apply(self, _kept: Kept) -> None:
        flags = mounts.MS_NOSUID | mounts.MS_NOEXEC
        mounts.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")


@dataclasses.dataclass(frozen=True, slots=True)
class TemporaryDirectories:
    """/tmp and /var/tmp, empty, of one tmpfs that they share; it counts as memory."""

    size_bytes: int | None

    def __str__(self) -> str:
        return f"mount new /tmp and /var/tmp, together {_shown_size(self.size_bytes)}"

    def apply(self, _kept: Kept) -> None:
        _mount_tmpfs(TEMPORARY, self.size_bytes, 0o700)
        for name, target in (("tmp", "/tmp"), ("var", "/var/tmp")):
            part = f"{TEMPORARY}/{name}"
            os.mkdir(part)
            os.chmod(part, 0o1777)
            if os.path.isdir(target) and not os.path.islink(target):
                mounts.mount(part, target, None, mounts.MS_BIND)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """An empty /dev/shm; it counts as memory."""

    size_bytes: int | None

    def __str__(self) -> str:
        return f"mount a new /dev/shm, {_shown_size(self.size_bytes)}"

    def apply(self, _kept: Kept) -> None:
        _mount_tmpfs("/dev/shm", self.size_bytes, 0o1777)


def _mount_tmpfs(target: str, size_bytes: int | None, mode: int) -> None:
    inodes = None if size_bytes is None else max(_INODES_LEAST, size_bytes // _INODE_BYTES)
    options = tmpfs_options(size_bytes, inodes, mode)
    text = ",".join(f"{key}={value}" for key, value in options.items())
    mounts.mount("tmpfs", target, "tmpfs", QUIET, text)


def _shown_size(size_bytes: int | None) -> str:
    return "as large as the kernel's default" if size_bytes is None else f"{size_bytes} bytes"


@dataclasses.dataclass(frozen=True, slots=True)
class ShowAgain:
    """Puts what waits in SHOWN below the temporary directory that is there now."""

    waiting: str
    target: str

    def __str__(self) -> str:
        return f"show {self.target}"

    def apply(self, _kept: Kept) -> None:
        is_directory = stat.S_ISDIR(os.stat(self.waiting).st_mode)
        make_mount_point(self.target, is_directory=is_directory)
        mounts.mount(self.waiting, self.target, None, mounts.MS_BIND | mounts.MS_REC)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkDirectory:
    """The slot's work directory, which the child has as a mount that is attached nowhere."""

    def __str__(self) -> str:
        return f"show the work directory as {TASK_DIRECTORY}"

    def apply(self, kept: Kept) -> None:
        mounts.attach(kept[TASK_DIRECTORY], TASK_DIRECTORY)


@dataclasses.dataclass(frozen=True, slots=True)
class Loopback:
    """Network interfaces of its own: loopback alone, and up."""

    def __str__(self) -> str:
        return "bring its own loopback up"

    def apply(self, _kept: Kept) -> None:
        net.bring_up()


@dataclasses.dataclass(frozen=True, slots=True)
class Keyring:
    """A session keyring of its own: keys of whoever started the worker are out of reach."""

    def __str__(self) -> str:
        return "join a new session keyring"

    def apply(self, _kept: Kept) -> None:
        keyring.join_new_session()
