"""Steps that make the read-only system which every slot of a worker sees."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from typing import Final

from stockade.platform import mounts
from stockade.platform.mounts import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY
from stockade.sandbox.steps import Kept, make_mount_point

# What a hidden directory or file is covered with; made with the private /run.
EMPTY_DIRECTORY: Final = "/run/.empty"
EMPTY_FILE: Final = "/run/.nothing"
TASK_DIRECTORY: Final = "/run/task"
# The one tmpfs behind all temporary directories: root's, so only its three parts are in reach.
TEMPORARY: Final = "/run/.temporary"
# All work directories, where root may not pass a slot its own: a user's zygote has them there, and
# each slot takes its own out and the rest away.
WORK: Final = "/run/.work"
# Where what is shown below a temporary directory waits for that directory to be mounted.
SHOWN: Final = "/run/.shown"

QUIET: Final = mounts.MS_NOSUID | mounts.MS_NODEV
_NODES: Final = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8),
                 "urandom": (1, 9), "tty": (5, 0)}  # fmt: skip
_LINKS: Final = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """Takes a copy of the mount at a path, before anything covers it."""

    path: str
    writable: bool

    def __str__(self) -> str:
        return f"keep {self.path}, {'read-write' if self.writable else 'read-only'}"

    def apply(self, kept: Kept) -> None:
        tree = mounts.open_tree(self.path, flags=mounts.AT_RECURSIVE)
        kept[self.path] = tree
        attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
        mounts.set_attributes(
            "",
            fd=tree,
            flags=mounts.AT_EMPTY_PATH | mounts.AT_RECURSIVE,
            add=attributes if self.writable else attributes | MOUNT_ATTR_RDONLY,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class KeepDevices:
    """Takes copies of the host's device nodes, where new ones cannot be made."""

    def __str__(self) -> str:
        return "keep the usual nodes of /dev"

    def apply(self, kept: Kept) -> None:
        for name in _NODES:
            kept[f"/dev/{name}"] = mounts.open_tree(f"/dev/{name}")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOnlySystem:
    """Makes every mount read-only, without setuid and devices, and cut off from the host's."""

    def __str__(self) -> str:
        return "make the whole system read-only, nosuid, nodev"

    def apply(self, _kept: Kept) -> None:
        mounts.set_attributes(
            "/",
            flags=mounts.AT_RECURSIVE,
            add=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV,
            propagation=mounts.MS_PRIVATE,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Detach:
    """Takes a mount away, with all that are below it: fewer mounts to copy for each slot."""

    path: str

    def __str__(self) -> str:
        return f"unmount the host's {self.path}"

    def apply(self, _kept: Kept) -> None:
        while os.path.ismount(self.path):
            mounts.unmount(self.path, mounts.MNT_DETACH)


@dataclasses.dataclass(frozen=True, slots=True)
class Devices:
    """A /dev with the usual nodes and nothing of the host's."""

    def __str__(self) -> str:
        return f"mount a new /dev with {', '.join(_NODES)}, fd"

    def apply(self, kept: Kept) -> None:
        flags = mounts.MS_NOSUID | mounts.MS_NOEXEC
        mounts.mount("tmpfs", "/dev", "tmpfs", flags, "mode=0755,size=64k,nr_inodes=64")
        for name, (major, minor) in _NODES.items():
            path = f"/dev/{name}"
            copy = kept.pop(path, None)
            if copy is None:
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            else:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
                mounts.attach(copy, path)
                os.close(copy)
        for name, target in _LINKS.items():
            os.symlink(target, f"/dev/{name}")
        for name in ("pts", "shm"):
            os.mkdir(f"/dev/{name}", 0o755)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """An empty /run with the mount points that later steps need.

    Attributes:
        for_work: WORK is among them.
    """

    for_work: bool

    def __str__(self) -> str:
        return "mount a new, empty /run"

    def apply(self, _kept: Kept) -> None:
        flags = QUIET | mounts.MS_NOEXEC
        mounts.mount("tmpfs", "/run", "tmpfs", flags, "mode=0755,size=1m,nr_inodes=4096")
        for path, mode in (
            (EMPTY_DIRECTORY, 0o555), (TASK_DIRECTORY, 0o755), (TEMPORARY, 0o700), (SHOWN, 0o700),
        ):  # fmt: skip
            os.mkdir(path, mode)
        if self.for_work:
            os.mkdir(WORK, 0o700)
        os.close(os.open(EMPTY_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0))


@dataclasses.dataclass(frozen=True, slots=True)
class Hide:
    """Covers a path, if there is one, with nothing; ``parent``: something in it is shown."""

    path: str
    parent: bool = False

    def __str__(self) -> str:
        return f"hide {self.path}"

    def apply(self, _kept: Kept) -> None:
        try:
            status = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISDIR(status.st_mode):
            mounts.mount(EMPTY_FILE, self.path, None, mounts.MS_BIND)
        elif self.parent:
            options = "mode=0755,size=64k,nr_inodes=1024"
            mounts.mount("tmpfs", self.path, "tmpfs", QUIET | mounts.MS_NOEXEC, options)
        else:
            mounts.mount(EMPTY_DIRECTORY, self.path, None, mounts.MS_BIND)


@dataclasses.dataclass(frozen=True, slots=True)
class Show:
    """Attaches what was kept of ``path`` at ``target``; makes the mount point where it can."""

    path: str
    target: str

    def __str__(self) -> str:
        return f"show {self.path}" if self.path == self.target else f"show {self.path} later"

    def apply(self, kept: Kept) -> None:
        copy = kept.pop(self.path)
        try:
            make_mount_point(self.target, is_directory=stat.S_ISDIR(os.fstat(copy).st_mode))
            mounts.attach(copy, self.target)
        finally:
            os.close(copy)


@dataclasses.dataclass(frozen=True, slots=True)
class Seal:
    """Makes one of our own mounts read-only now that all is in it."""

    path: str

    def __str__(self) -> str:
        return f"make {self.path} read-only"

    def apply(self, _kept: Kept) -> None:
        with contextlib.suppress(FileNotFoundError):
            mounts.set_attributes(self.path, add=MOUNT_ATTR_RDONLY)
