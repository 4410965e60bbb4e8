"""A slot: the resources of one task, made ready before the task arrives, used once.

A slot has a cgroup, a uid (as root), a work directory, an output FIFO, and a launcher that waits in
it, confined as the profile says. ``make`` prepares all of that; ``launch`` hands the launcher its
message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import os
import socket
from collections.abc import Iterator, Sequence

from stockade.platform import files, pidfd, proc
from stockade.sandbox import project_quota
from stockade.sandbox.confiner import Confiner, Plan
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.launch_message import GO, LaunchMessage, encode
from stockade.sandbox.limits import Limits
from stockade.sandbox.places import Places
from stockade.sandbox.profiles import Profile
from stockade.sandbox.slot_groups import SlotGroups
from stockade.sandbox.tree import Tree
from stockade.sandbox.uids import UidPool
from stockade.sandbox.work_directory import (
    WorkDirectory,
    open_work_directory,
    unmount_work_directory,
    wants_project,
    wants_tmpfs,
)


class Making(enum.StrEnum):
    """What the spawner does for a slot, in the order it is done; an error names the step."""

    PLACE = "make a work directory"
    UID = "give the task a uid"
    WORK = "open the work directory"
    CGROUP = "make a cgroup"
    OUTPUT = "make an output pipe"
    LAUNCHER = "start a launcher"


@dataclasses.dataclass(slots=True, eq=False)
class Slot:
    """One slot, ready or in use.

    Attributes:
        name: ``N-K``: the spawner's generation and a counter.
        channel: our end of the launcher's socketpair; None after a takeover.
        message_fd: the memfd that the launcher reads its message from; closed at launch.
        output_fd: a read end of the output FIFO, held so that nothing printed is lost while no
            supervisor reads.
        plan: how it is confined; None after a takeover.
        work: the work directory, open until the task starts.
    """

    name: str
    uid: int | None
    uid_lock: int | None
    groups: SlotGroups | None
    launcher_pid: int
    launcher_start: int
    launcher_pidfd: int
    channel: socket.socket | None
    message_fd: int
    output_fd: int
    controllers: frozenset[str] = frozenset()
    plan: Plan | None = None
    work: WorkDirectory = dataclasses.field(default_factory=lambda: WorkDirectory(-1))

    def limit(self, limits: Limits, current: Limits) -> None:
        """Applies what of ``limits`` differs from the ``current`` ones of the slot.

        Raises:
            SyscallError: the kernel refuses a value.
        """
        if self.groups is not None:
            self.groups.limit(self.controllers, limits, current)

    def is_waiting(self) -> bool:
        """Whether its launcher lives."""
        return not pidfd.has_ended(self.launcher_pidfd)

    def let_go(self) -> None:
        """Closes the channel and what else is ours of the launcher; one that waits then exits."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.work.close()
        for name in ("launcher_pidfd", "message_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


class SlotMaker:
    """Makes slots for one spawner."""

    def __init__(
        self, places: Places, tree: Tree | None, uids: UidPool | None, confiner: Confiner,
        *, generation: int,
    ) -> None:  # fmt: skip
        self._places = places
        self._tree = tree
        self._uids = uids
        self._confiner = confiner
        self._generation = generation
        self._counter = 0
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def make(self, profile: Profile, limits: Limits) -> Slot:
        """A fresh slot with its launcher waiting, or about to.

        Raises:
            SandboxSetupError: naming the step; everything made for it is taken back.
        """
        plan = self._confiner.plan(profile, limits)
        files_limits = self._confiner.files(limits)
        step = Making.PLACE
        try:
            with contextlib.ExitStack() as undo:
                name = self._new_directory()
                undo.callback(os.rmdir, name, dir_fd=self._places.work)
                uid = lock = None
                if self._uids is not None:
                    step = Making.UID
                    uid, lock = self._uids.take()
                    undo.callback(self._uids.give_back_unused, uid, lock)
                step = Making.WORK
                path = self._places.work_directory(name)
                if wants_tmpfs(files_limits):
                    undo.callback(unmount_work_directory, path)
                elif wants_project(files_limits) and uid is not None:
                    undo.callback(project_quota.lift, self._places.work, uid)
                work = open_work_directory(
                    self._places.work, self._places.work_path, name, files_limits, uid,
                    detached=plan.confinement.has_own_files and self._uids is not None,
                )  # fmt: skip
                undo.callback(work.close)

                groups = None
                if self._tree is not None:
                    step = Making.CGROUP
                    groups = self._tree.slot(name)
                    undo.callback(groups.remove)
                    groups.create(self._tree.controllers, limits)

                step = Making.OUTPUT
                read_end, write_end = self._output(name, uid)
                undo.callback(os.unlink, name, dir_fd=self._places.output)
                undo.callback(os.close, read_end)

                step = Making.LAUNCHER
                with _closing(write_end):
                    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    undo.callback(ours.close)
                    ours.setblocking(False)
                    message_fd = os.memfd_create("stockade-launch", os.MFD_CLOEXEC)
                    undo.callback(os.close, message_fd)
                    with theirs:
                        given = (write_end, theirs.fileno(), message_fd, read_end, lock)
                        pid, pidfd = self._launcher(plan, name, groups, given, work.mount)
                undo.pop_all()
        except OSError as error:
            raise SandboxSetupError.refused(step, error) from error
        if work.mount >= 0:
            os.close(work.mount)
            work.mount = -1
        return Slot(
            name=name,
            uid=uid,
            uid_lock=lock,
            groups=groups,
            launcher_pid=pid,
            # Our own child, not yet reaped: its entry in /proc cannot be missing.
            launcher_start=proc.start_time_ticks(pid) or 0,
            launcher_pidfd=pidfd,
            channel=ours,
            message_fd=message_fd,
            output_fd=read_end,
            controllers=self._tree.controllers if self._tree is not None else frozenset(),
            plan=plan,
            work=work,
        )

    def _new_directory(self) -> str:
        while True:
            self._counter += 1
            name = f"{self._generation}-{self._counter}"
            try:
                os.mkdir(name, 0o700, dir_fd=self._places.work)
            except FileExistsError:
                # Set aside by an earlier life of this generation.
                continue
            return name

    def _output(self, name: str, uid: int | None) -> tuple[int, int]:
        directory = self._places.output
        files.make_fifo_at(directory, name, 0o600)
        if uid is not None:
            # The task may open /dev/stdout, which is this FIFO, anew.
            os.chown(name, uid, uid, dir_fd=directory, follow_symlinks=False)
        read_end = open_output(self._places, name)
        try:
            write_end = os.open(name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
        except OSError:
            os.close(read_end)
            raise
        return read_end, write_end

    def _launcher(
        self, plan: Plan, name: str, groups: SlotGroups | None,
        given: tuple[int, int, int, int, int | None], work_mount: int,
    ) -> tuple[int, int]:  # fmt: skip
        write_end, channel, message_fd, read_end, lock = given
        init_fd = groups.init.open() if groups is not None else None
        task_fd = groups.task.open() if groups is not None else None
        null = self._null
        try:
            # By their numbers in the launcher, see launch_message.
            table = [
                null, write_end, write_end, channel, message_fd,
                null if task_fd is None else task_fd, null, read_end,
                null if lock is None else lock,
            ]  # fmt: skip
            if work_mount >= 0:
                table.append(work_mount)
            return self._confiner.make_launcher(plan, name, init_fd, table)
        finally:
            for fd in (init_fd, task_fd):
                if fd is not None:
                    os.close(fd)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def open_output(places: Places, name: str) -> int:
    """A read end of its own, non-blocking, of a slot's output FIFO."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(name, flags, dir_fd=places.output)


def put_files(slot: Slot, contents: Sequence[tuple[str, bytes]]) -> None:
    """Writes files into the slot's work directory, 0600 and the task's, before the task starts.

    Raises:
        OSError: one cannot be written.
    """
    for name, content in contents:
        if "/" in name or name in ("", ".", ".."):
            raise OSError(errno.EINVAL, "not a plain file name", name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=slot.work.fd)
        try:
            files.write_all(fd, content)
            if slot.uid is not None:
                os.fchown(fd, slot.uid, slot.uid)
        finally:
            os.close(fd)


def launch(slot: Slot, message: LaunchMessage, record_fd: int, stdio: Sequence[int]) -> None:
    """Hands the waiting launcher its message. Never waits, even for a stopped launcher.

    Raises:
        OSError: the launcher is gone.
    """
    assert slot.channel is not None
    files.write_all(slot.message_fd, encode(message))
    os.close(slot.message_fd)
    slot.message_fd = -1
    slot.work.close()
    socket.send_fds(slot.channel, [GO], [record_fd, *stdio], socket.MSG_DONTWAIT)
