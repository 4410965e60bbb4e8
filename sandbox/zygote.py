"""The zygotes: small processes that make launchers, each in the mounts that its slots start from.

A slot gets a copy of its zygote's mount namespace by one flag of clone3. The mounts are private:
what the host mounts later does not appear in them, and what it unmounts stays in use until the
spawner ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from stockade.platform import clone, mounts, pidfd, prctl, proc, userns
from stockade.platform.errors import StockadeError, SyscallError
from stockade.sandbox import steps
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.steps import Step
from stockade.sandbox.system_steps import WORK
from stockade.sandbox.work_directory import mount_of
from stockade.sandbox.zygote_message import ANSWER, READY, encode_request

LAUNCHER: Final = Path(__file__).with_name("launcher")
RESOLV_CONF: Final = "/etc/resolv.conf"

# zygote.h: the launcher's name is written over both.
_ARGUMENTS: Final = ("stockade-zygote", "-")
# Descriptors are first copied above this number, so that none is overwritten before it was moved.
_PARKED: Final = 64
_TEXT_BYTES: Final = 4096
# What the steps of a slot take; its launcher gives them up before a task runs.
_CAPABILITIES: Final = frozenset({"CAP_SYS_ADMIN", "CAP_NET_ADMIN"})
# It is made in milliseconds, and answers in less; one that is stopped must not stop the spawner for
# good. A slow host may be busy with other things.
_START_S: Final = 10.0
_ANSWER_S: Final = 5.0


class ZygoteLostError(StockadeError):
    """A zygote is gone, or does not answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """Where the slots of one zygote start from.

    Attributes:
        system: the steps that make their mounts; none: the spawner's own.
        as_root: real root does them; else a user, in a user namespace.
        work_path: where all work directories are, which a user's zygote brings along.
        oom_score_adj: of the launchers and tasks.
    """

    system: tuple[Step, ...]
    as_root: bool
    work_path: str
    oom_score_adj: int

    @property
    def clone_flags(self) -> int:
        """CLONE_NEW* of the zygote."""
        if not self.system:
            return 0
        return clone.CLONE_NEWNS | (0 if self.as_root else clone.CLONE_NEWUSER)


class Zygote:
    """One zygote, a child of this process, which must have a single thread when it is made.

    Args:
        launcher: a descriptor of its program; None: opens it.

    Raises:
        SandboxSetupError: a step failed; names it, the call and its error.
    """

    def __init__(self, ground: Ground, launcher: int | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pidfd = -1
        try:
            with theirs:
                uid, gid = os.geteuid(), os.getegid()
                self.pid, self.pidfd = clone.clone3(ground.clone_flags)
                if self.pid == 0:
                    _become_zygote(ground, launcher, theirs.fileno(), uid, gid)
            self._socket.settimeout(_START_S)
            said = self._socket.recv(_TEXT_BYTES)
            self._socket.settimeout(_ANSWER_S)
        except OSError as error:
            self.close()
            raise SandboxSetupError.refused("start a zygote", error) from error
        if said != READY:
            self.close()
            text = said.decode(errors="replace") or "it died"
            raise SandboxSetupError("make the system that tasks see", text)

    def make(
        self, flags: int, cgroup_fd: int | None, program_fd: int, table: Sequence[int]
    ) -> tuple[int, int]:
        """A launcher: its pid and pidfd; this process is its parent.

        Args:
            flags: CLONE_NEW*.
            cgroup_fd: the group that it starts in.
            program_fd: what it does first.
            table: its descriptors 0, 1, 2, ...

        Raises:
            ZygoteLostError: the zygote is gone.
            SyscallError: as clone.clone3.
        """
        first = () if cgroup_fd is None else (cgroup_fd,)
        request = encode_request(flags, into_cgroup=cgroup_fd is not None)
        try:
            socket.send_fds(self._socket, [request], [*first, program_fd, *table])
            answer, fds, _, _ = socket.recv_fds(
                self._socket, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ZygoteLostError(f"no answer from the zygote: {error}") from error
        if len(answer) != ANSWER.size:
            raise ZygoteLostError("no answer from the zygote: it is gone")
        (pid,) = ANSWER.unpack(answer)
        if pid < 0:
            raise SyscallError("clone3", f"flags={flags:#x}", -pid)
        if not fds:
            # No descriptor was left for the pidfd. Our child is not reaped yet: the number is its.
            pidfd.checked_kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise SyscallError("recvmsg", "a launcher's pidfd", errno.EMFILE)
        return pid, fds[0]

    def close(self, *, wait: bool = False) -> None:
        """Ends it, and waits for that if nobody may be there to reap it; its launchers stay."""
        self._socket.close()
        if self.pidfd >= 0:
            # One that is stopped, or stuck before its exec, does not see that we hung up.
            pidfd.send_signal(self.pidfd, signal.SIGKILL)
            if wait:
                # One that died before may have been reaped with the other children.
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            os.close(self.pidfd)


def open_launcher() -> int:
    """A descriptor of the launcher's program (close-on-exec).

    Raises:
        OSError: it is not there.
    """
    return os.open(LAUNCHER, os.O_RDONLY | os.O_CLOEXEC)


def _become_zygote(
    ground: Ground, launcher: int | None, channel: int, uid: int, gid: int
) -> NoReturn:
    try:
        program = open_launcher() if launcher is None else launcher
        os.setsid()
        # The worker, and perhaps its unit (OOMScoreAdjust=), are protected; tasks are not.
        with steps.named("set oom_score_adj"):
            proc.set_oom_score_adj(ground.oom_score_adj)
        os.umask(0)
        if ground.system:
            _make_system(ground, uid, gid)
            os.chdir("/")
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        *parked, program = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKED)
            for fd in (null, null, null, channel, program)
        ]
        for target, fd in enumerate(parked):
            os.dup2(fd, target)
        os.execve(program, _ARGUMENTS, {})
    except (StockadeError, OSError) as error:
        text = str(error).encode(errors="backslashreplace")[:_TEXT_BYTES]
        with contextlib.suppress(OSError), socket.socket(fileno=channel) as peer:
            peer.send(text)
    finally:
        os._exit(1)


def _make_system(ground: Ground, uid: int, gid: int) -> None:
    if ground.as_root:
        steps.run(ground.system, {})
        return
    with steps.named("map its own user and group into the user namespace"):
        userns.keep_own_ids(uid, gid)
    with steps.named("keep the work directories"):
        work = mount_of(ground.work_path)
    steps.run(ground.system, {})
    with steps.named("bring the work directories along"):
        mounts.attach(work, WORK)
        os.close(work)
    with steps.named("keep its capabilities in the user namespace"):
        prctl.keep_over_exec(_CAPABILITIES)


def resolv_conf_in_run() -> str | None:
    """What /etc/resolv.conf leads to, when that is a file in /run, which tasks get empty."""
    target = os.path.realpath(RESOLV_CONF)
    return target if target.startswith("/run/") and os.path.isfile(target) else None


class Zygotes:
    """The zygotes of a spawner by the system that they stand in, made when first asked for.

    One that is gone is replaced; so is one whose resolv.conf has become another file.

    Raises:
        OSError: there is no launcher's program.
    """

    def __init__(self, *, as_root: bool, work_path: str, oom_score_adj: int) -> None:
        self._as_root = as_root
        self._work_path = work_path
        self._oom_score_adj = oom_score_adj
        self._resolv_conf = resolv_conf_in_run()
        # Once: an upgrade replaces the file, and what it puts there may speak another language.
        self._launcher = open_launcher()
        self._zygotes: dict[tuple[Step, ...], tuple[Zygote, tuple[int, int] | None]] = {}

    def of(self, system: tuple[Step, ...]) -> Zygote:
        """The zygote in such a system.

        Raises:
            SandboxSetupError: it cannot be made.
        """
        identity = self._identity() if system else None
        found = self._zygotes.get(system)
        # While there is no such file, what it was is the best there is.
        if found is not None and identity in (found[1], None):
            return found[0]
        ground = Ground(system, self._as_root, self._work_path, self._oom_score_adj)
        zygote = Zygote(ground, self._launcher)
        self.lose(system)
        self._zygotes[system] = (zygote, identity)
        return zygote

    def make(
        self, system: tuple[Step, ...], flags: int, cgroup_fd: int | None, program_fd: int,
        table: Sequence[int],
    ) -> tuple[int, int]:  # fmt: skip
        """A launcher, as Zygote.make; a zygote that is gone is made again, once.

        Raises:
            SandboxSetupError: it cannot be made.
            SyscallError: as clone.clone3.
        """
        try:
            return self.of(system).make(flags, cgroup_fd, program_fd, table)
        except ZygoteLostError:
            self.lose(system)
        try:
            return self.of(system).make(flags, cgroup_fd, program_fd, table)
        except ZygoteLostError as error:
            self.lose(system)
            raise SandboxSetupError("start a launcher", str(error)) from error

    def close(self) -> None:
        """Ends all of them: they are gone then."""
        for system in list(self._zygotes):
            self.lose(system, wait=True)
        if self._launcher >= 0:
            os.close(self._launcher)
            self._launcher = -1

    def lose(self, system: tuple[Step, ...], *, wait: bool = False) -> None:
        """Ends a zygote, if there is one."""
        found = self._zygotes.pop(system, None)
        if found is not None:
            found[0].close(wait=wait)

    def _identity(self) -> tuple[int, int] | None:
        if self._resolv_conf is None:
            return None
        try:
            found = os.stat(self._resolv_conf)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
