"""A blocking client of a real spawner, for tests of the sandbox layer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stockade.platform import memfd, proc, sockets
from stockade.platform.errors import StockadeError
from stockade.sandbox import protocol
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Outcome
from stockade.sandbox.profiles import WHOLE_VIEW, Profile, View
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.spawner_start import find_spawner, start_spawner

# Emulated processors are slow.
DEADLINE_S = 300.0 if os.environ.get("STOCKADE_LAB_HOST") else 30.0
# Where state lies: /tmp is a tmpfs on some hosts.
DISK = "/var/tmp"
Found = TypeVar("Found")


def eventually(look: Callable[[], Found], deadline_s: float = DEADLINE_S) -> Found:
    """The first true answer of ``look``; fails the test after a generous deadline."""
    end = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"still {found!r} after {deadline_s} s"
        select.select([], [], [], 0.01)


class SpawnerClient:
    """One worker's directories and the connection to its spawner."""

    def __init__(
        self,
        lifetime: Lifetime = Lifetime.LASTING,
        profile: Profile = Profile.PROCESS,
        view: View = WHOLE_VIEW,
        **settings: Any,
    ) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="stockade-test-", dir=DISK))
        self.home.chmod(0o711)
        self.settings = SpawnerSettings(
            worker_id=self.home.name,
            runtime_dir=str(self.home / "run"),
            state_dir=str(self.home / "state"),
            supervisor_uid=os.geteuid(),
            supervisor_gid=os.getegid(),
            uid_min=1879048192,
            uid_max=1879048192 + 999,
            profile=profile,
            pool_min=2,
            pool_max=2,
            lifetime=lifetime,
            view=view,
        )
        self.settings = dataclasses.replace(self.settings, **settings)
        self.outputs: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.outcomes: dict[int, Outcome] = {}
        try:
            self.connect()
        except StockadeError:
            shutil.rmtree(self.home)
            raise

    def connect(self) -> protocol.Welcome:
        """Finds or starts the spawner and says Hello."""
        started = start_spawner(self.settings)
        return self.connect_to(started.socket_path)

    def connect_to(self, path: str) -> protocol.Welcome:
        self.socket = sockets.connect_seqpacket(path)
        self.socket.settimeout(DEADLINE_S)
        self.send(protocol.Hello(protocol.PROTOCOL_VERSION, "test"))
        welcome = self.receive()
        assert isinstance(welcome, protocol.Welcome)
        self.welcome = welcome
        return welcome

    def reconnect(self) -> protocol.Welcome:
        """After the spawner's death: connects to whoever is in charge then."""
        self.socket.close()
        path = eventually(lambda: find_spawner(self.settings.runtime_dir))
        return self.connect_to(path)

    def send(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> None:
        sockets.send_packet(self.socket, protocol.encode(message), fds)

    def receive(self) -> protocol.Message:
        packet, fds = sockets.receive_packet(
            self.socket, protocol.MAX_MESSAGE_BYTES, protocol.MAX_DESCRIPTORS
        )
        assert packet, "the spawner hung up"
        message = protocol.decode(packet)
        if isinstance(message, protocol.Prepared) and message.seq in self.outputs:
            # In another slot: nothing ran in the one before.
            os.close(self.outputs.pop(message.seq))
        if isinstance(message, protocol.Prepared | protocol.Started | protocol.Ended) and fds:
            self._keep_output(message.seq, fds[0])
        if isinstance(message, protocol.Started):
            self.pids[message.seq] = message.pid
        if isinstance(message, protocol.Ended):
            self.outcomes[message.seq] = message.outcome
        if isinstance(message, protocol.Listed):
            with_output = [task for task in message.tasks if task.has_output]
            for task, fd in zip(with_output, fds, strict=True):
                self._keep_output(task.seq, fd)
        return message

    def _keep_output(self, seq: int, fd: int) -> None:
        if seq in self.outputs:
            os.close(fd)
        else:
            self.outputs[seq] = fd

    def start(
        self, seq: int, argv: list[str], limits: Limits | None = None,
        environment: tuple[str, ...] = ("PATH=/usr/bin:/bin",),
        files: dict[str, bytes] | None = None,
        stdio: tuple[int, ...] = (), directory: str | None = None,
        profile: Profile | None = None, container: protocol.Container | None = None,
    ) -> None:  # fmt: skip
        strings = [*argv, *environment]
        files = files or {}
        fds = [memfd.sealed_memfd("spec", b"".join(os.fsencode(s) + b"\0" for s in strings))]
        fds += [memfd.sealed_memfd("file", content) for content in files.values()]
        self.send(
            protocol.Start(
                seq=seq,
                argc=len(argv),
                envc=len(environment),
                files=tuple(files),
                own_stdio=bool(stdio),
                directory=directory,
                profile=profile or self.settings.profile,
                limits=limits or Limits(),
                container=container,
            ),
            (*fds, *stdio),
        )
        for fd in fds:
            os.close(fd)

    def wait_started(self, seq: int) -> int:
        while seq not in self.pids:
            self.receive()
        return self.pids[seq]

    def wait_ended(self, seq: int) -> Outcome:
        while seq not in self.outcomes:
            self.receive()
        return self.outcomes[seq]

    def run(self, seq: int, script: str, limits: Limits | None = None) -> tuple[Outcome, bytes]:
        """Runs a shell script to its end; its outcome and output. Acknowledges it."""
        self.start(seq, ["/bin/bash", "-c", script], limits)
        outcome = self.wait_ended(seq)
        output = self.output(seq)
        self.send(protocol.Acknowledge(seq))
        return outcome, output

    def cancel(self, seq: int) -> None:
        self.send(protocol.Cancel(seq))

    def acknowledge(self, seq: int) -> None:
        """Says that an outcome is safe, and forgets it."""
        self.send(protocol.Acknowledge(seq))
        del self.outcomes[seq]
        self.output(seq)

    def output(self, seq: int) -> bytes:
        """What is in the output pipe now."""
        fd = self.outputs.pop(seq, None)
        if fd is None:
            return b""
        parts = []
        try:
            while part := os.read(fd, 65536):
                parts.append(part)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)
        return b"".join(parts)

    def record(self, seq: int) -> Path:
        return self.home / "run/spawner/record" / str(seq)

    def send_list(self) -> protocol.Listed:
        """The first page of the tasks that the spawner knows; ended ones are acknowledged."""
        self.send(protocol.List(after=-1))
        while not isinstance(message := self.receive(), protocol.Listed):
            pass
        for task in message.tasks:
            if task.outcome is not None:
                self.outcomes[task.seq] = task.outcome
        return message

    def send_finish(self) -> None:
        """Has the spawner end, with its directories left as they are, and waits for its end."""
        spawner = self.welcome.pid
        self.send(protocol.Finish())
        eventually(lambda: reap(spawner))
        self.socket.close()

    def close(self) -> None:
        """Ends the spawner and checks that it left nothing."""
        spawner = self.welcome.pid
        started = proc.start_time_ticks(spawner)
        for seq in list(self.outcomes):
            self.send(protocol.Acknowledge(seq))
        # Last: with nothing left to acknowledge the spawner ends, and hangs up, at once.
        self.send(protocol.Finish())
        eventually(lambda: proc.start_time_ticks(spawner) != started or reap(spawner))
        self.socket.close()
        for fd in self.outputs.values():
            os.close(fd)
        assert sorted(os.listdir(self.home / "run/spawner")) == [
            "lock",
            "output",
            "record",
            "token",
        ]
        for left in ("run/spawner/output", "run/spawner/record", "state/work"):
            assert os.listdir(self.home / left) == []
        shutil.rmtree(self.home)


def children(spawner: int, name: str) -> list[int]:
    """The spawner's children of this name, as ``ps`` has it: standby, launcher, zygote."""
    found = []
    for pid in proc.children(spawner):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as file:
            if file.read().strip() == f"stockade-{name}"[:15]:
                found.append(pid)
    return found


def launchers(spawner: int) -> list[int]:
    """The launchers that are the spawner's children, waiting or with a task."""
    return children(spawner, "launcher")


def reap(pid: int) -> bool:
    """Whether our child ``pid`` has ended; it is reaped then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return proc.start_time_ticks(pid) is None


def kill_now(pid: int) -> None:
    """SIGKILL, and waits until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: reap(pid))


def lives(marker: str) -> list[int]:
    """Processes whose command line holds ``marker``."""
    found = []
    for pid in proc.all_processes():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if marker.encode() in file.read() and pid != os.getpid():
                    found.append(pid)
        except OSError:
            continue
    return found
