"""cgroup v2 groups and their files, on cgroupspy's Controller and file interfaces.

cgroupspy is made for v1: what is taken from it is the mapping of attributes to files. Its buffered
reads and writes are replaced here (an error that a file of the kernel reports when a buffer is
flushed at close is lost); cgroup_files adds the kinds of file that are v2's own. Its tree classes
are not used: they read the whole hierarchy when they are made, which takes longer the more tasks
run, know groups that are gone and not those that came, and choose a node's files by the v1
controller that its directory is named after.

Reading an attribute whose file is absent (no such controller, older kernel) gives None; writing it
raises SyscallError. A limit that is ``max`` reads as "max", and is set by None or "max".

Source: Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from cgroupspy.controllers import Controller

from stockade.platform._libc import translated
from stockade.platform.cgroup_files import (
    BandwidthFile,
    CountFile,
    DeviceTableFile,
    IoMaxFile,
    LimitFile,
    NamesFile,
    OnOffFile,
    PidsFile,
    PressureFile,
    TableFile,
    WeightFile,
)
from stockade.platform.errors import SyscallError
from stockade.platform.mounts import unescape

# The kernel hands out a file's lines when they fill a page or when they end (fs/seq_file.c), and no
# line of a group's file is as long as half a page: what is shorter is the end. Saves a read.
_PAGE_BYTES: Final = 4096
_LAST_BYTES: Final = _PAGE_BYTES // 2


class _Node(NamedTuple):
    """What cgroupspy's Controller wants to know of a group."""

    full_path: bytes


class Group(Controller):  # type: ignore[misc]  # cgroupspy has no types
    """One group, by the path of its directory. Making a Group touches nothing."""

    procs = PidsFile("cgroup.procs")
    controllers = NamesFile("cgroup.controllers")
    subtree_control = NamesFile("cgroup.subtree_control")
    events = TableFile("cgroup.events")
    stat = TableFile("cgroup.stat")
    max_descendants = LimitFile("cgroup.max.descendants")

    cpu_stat = TableFile("cpu.stat")
    cpu_max = BandwidthFile("cpu.max")
    cpu_weight = CountFile("cpu.weight")
    cpu_pressure = PressureFile("cpu.pressure")

    memory_max = LimitFile("memory.max")
    memory_high = LimitFile("memory.high")
    memory_swap_max = LimitFile("memory.swap.max")
    memory_oom_group = OnOffFile("memory.oom.group")
    memory_current = CountFile("memory.current", readonly=True)
    memory_peak = CountFile("memory.peak", readonly=True)
    memory_events = TableFile("memory.events")
    memory_events_local = TableFile("memory.events.local")
    memory_pressure = PressureFile("memory.pressure")

    pids_max = LimitFile("pids.max")
    pids_current = CountFile("pids.current", readonly=True)
    pids_peak = CountFile("pids.peak", readonly=True)
    pids_events = TableFile("pids.events")
    pids_events_local = TableFile("pids.events.local")

    io_weight = WeightFile("io.weight")
    io_max = IoMaxFile("io.max")
    io_stat = DeviceTableFile("io.stat")
    io_pressure = PressureFile("io.pressure")

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self.path: Final[bytes] = os.fsencode(path)
        super().__init__(_Node(self.path))

    def __repr__(self) -> str:
        return f"Group({self.path!r})"

    def get_property(self, filename: bytes) -> str | None:
        """The file's text without surrounding white space; None when it is absent.

        Raises:
            SyscallError: for example ENODEV, when the group was removed while it was read.
        """
        path = self.filepath(filename)
        with translated("read", path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                return _read_whole(fd).decode().strip()
            finally:
                os.close(fd)

    def set_property(self, filename: bytes, value: Any) -> None:
        """Writes the file by exactly one write(2).

        Raises:
            SyscallError: ENOENT when the file is absent, and what the kernel says of the value.
        """
        path = self.filepath(filename)
        text = str(value).encode()
        with translated("write", path, text):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, text)  # the kernel takes all of it or fails
            finally:
                os.close(fd)

    def filepath(self, filename: bytes) -> bytes:
        """The path of one of the group's files."""
        return b"%b/%b" % (self.path, filename)

    @property
    def exists(self) -> bool:
        """Whether the directory is there."""
        return os.path.isdir(self.path)

    @property
    def has_kill(self) -> bool:
        """Whether ``kill`` works: Linux 5.14, or a backport; never in the root group."""
        return os.path.exists(self.filepath(b"cgroup.kill"))

    def child(self, name: str | bytes) -> Group:
        """The group of that name in this one, made or not."""
        return Group(self.filepath(os.fsencode(name)))

    def create(self) -> None:
        """Makes the group.

        Raises:
            SyscallError: EEXIST, ENOENT (no parent), EAGAIN (cgroup.max.descendants), EACCES.
        """
        with translated("mkdir", self.path):
            os.mkdir(self.path, 0o755)

    def remove(self) -> None:
        """Removes the group, which must be empty.

        Raises:
            SyscallError: EBUSY while it has processes or groups in it, also for a moment after
                they were killed: wait for ``populated`` to be False. ENOENT.
        """
        with translated("rmdir", self.path):
            os.rmdir(self.path)

    def remove_tree(self) -> None:
        """Removes the group and every group in it, deepest first. Absent ones are no error.

        Raises:
            SyscallError: EBUSY when one of them has a process; those below it are gone then.
        """
        # Parents before children, so that walked backwards it is deepest first.
        groups = [self]
        for group in groups:
            groups.extend(group.children())
        for group in reversed(groups):
            try:
                group.remove()
            except SyscallError as error:
                if error.errno != errno.ENOENT:
                    raise

    def children(self) -> list[Group]:
        """The groups directly in this one, none when it is absent."""
        with translated("scandir", self.path):
            try:
                with os.scandir(self.path) as entries:
                    return [
                        Group(entry.path)
                        for entry in entries
                        if entry.is_dir(follow_symlinks=False)
                    ]
            except FileNotFoundError:
                return []

    def open(self) -> int:
        """The directory's descriptor (close-on-exec), as clone3 takes it."""
        with translated("open", self.path):
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def attach(self, pid: int) -> None:
        """Moves a process, with all its threads, into the group; 0 is the caller.

        Raises:
            SyscallError: ESRCH; EBUSY when controllers are enabled for children; EACCES; EAGAIN.
        """
        self.set_property(b"cgroup.procs", int(pid))

    def kill(self) -> None:
        """Sends SIGKILL to every process in the group and in all groups below (Linux 5.14).

        Under a tiny cpu.max they take long to die: raise it first.

        Raises:
            SyscallError: ENOENT when the group is gone or the kernel is older.
        """
        self.set_property(b"cgroup.kill", 1)

    @property
    def populated(self) -> bool:
        """Whether any live process is in the group or below. A process to be reaped is not live.

        Raises:
            SyscallError: ENOENT when the group is gone, or is the root group, which has no such
                file: it was not seen to be empty.
        """
        events = self.events
        if events is None:
            raise SyscallError("read", repr(self.filepath(b"cgroup.events")), errno.ENOENT)
        return events["populated"] != 0

    def events_fd(self) -> int:
        """cgroup.events for poll(2): POLLPRI says that ``populated`` may have changed.

        A fresh descriptor is ready at once; a read makes it wait for the next change, so nothing is
        missed. Ask for POLLPRI alone: POLLIN is always there.
        """
        with translated("open", self.filepath(b"cgroup.events")):
            return os.open(self.filepath(b"cgroup.events"), os.O_RDONLY | os.O_CLOEXEC)

    def enable(self, controllers: Iterable[str]) -> None:
        """Enables controllers for the groups in this one: all of them or none.

        Raises:
            SyscallError: ENOENT for a controller that is not in ``controllers``; EBUSY while the
                group has processes of its own.
        """
        words = " ".join(f"+{name}" for name in sorted(controllers))
        if words:
            self.set_property(b"cgroup.subtree_control", words)


def find_mount() -> Path | None:
    """Where cgroup v2 is mounted, alone or beside v1 hierarchies; None when it is not.

    Only a mount whose root is that of our cgroup namespace, since that is what the paths in
    /proc/PID/cgroup start from: see ``find_foreign_mount``.
    """
    return next((path for root, path in _mounts() if root == b"/"), None)


def find_foreign_mount() -> Path | None:
    """Where cgroup v2 is mounted with another root than our cgroup namespace's; None when not.

    Such as the host's whole tree in a container that has a cgroup namespace of its own: what is our
    own group in that tree cannot be told from inside (cgroup_namespaces(7)).
    """
    return next((path for root, path in _mounts() if root != b"/"), None)


def _mounts() -> Iterator[tuple[bytes, Path]]:
    """Root, as our cgroup namespace sees it, and place of each mount of cgroup v2."""
    with translated("read", "/proc/self/mountinfo"):
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    for line in lines:
        # "36 35 98:0 /root /mount/point options optional... - type source options"
        before, _, after = line.partition(b" - ")
        if after.split(b" ", 1)[0] == b"cgroup2":
            root, path = before.split(b" ")[3:5]
            yield root, Path(os.fsdecode(unescape(path)))


def own_group() -> str:
    """Our own group's path below the mount, such as ``/system.slice/x.service``.

    Raises:
        SyscallError: ENOENT on a host without cgroup v2.
    """
    group = group_of(os.getpid())
    if group is None:
        raise SyscallError("read", "/proc/self/cgroup", errno.ENOENT)
    return group


def group_of(pid: int) -> str | None:
    """A process's group below the mount; None when the process is gone, or without cgroup v2."""
    path = f"/proc/{pid}/cgroup"
    with translated("read", path):
        try:
            lines = Path(path).read_bytes().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return None
    for line in lines:
        if line.startswith(b"0::"):
            return os.fsdecode(line[3:])
    return None


def _read_whole(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, _PAGE_BYTES):
        parts.append(part)
        if len(part) < _LAST_BYTES:
            break
    return b"".join(parts)
