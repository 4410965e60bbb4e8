"""One command under a spawner of its own, its output copied through: the work of `stockade run`.

No event loop: one poll over the spawner's socket and two pipes, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import os
import select
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from stockade.platform import sockets
from stockade.platform.errors import StockadeError
from stockade.platform.files import open_directory
from stockade.platform.pidfd import has_ended, open_pidfd, reap
from stockade.sandbox.cleanup import remove_tree
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import Profile, View
from stockade.sandbox.protocol import (
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Acknowledge,
    Cancel,
    Ended,
    Finish,
    Hello,
    Message,
    Refused,
    Unstarted,
    Welcome,
    decode,
    encode,
)
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner
from stockade.supervisor.cli.streams import Streams
from stockade.supervisor.errors import SpawnerLostError
from stockade.supervisor.process_plan import PackedStart, ProcessPlan, pack_start

SEQ: Final = 1
UID_MIN: Final = 0x70000000
UID_MAX: Final = UID_MIN + 65_535
RUN_PREFIX: Final = "stockade-run-"
HANDSHAKE_S: Final = 30.0
# The spawner's clean-up of a work directory, which may be large.
SPAWNER_EXIT_S: Final = 60.0

_CANCEL_REASON: Final = "cancelled by "


def ended_by_signal(outcome: Outcome) -> int:
    """The number of the signal that made us cancel the task with this outcome."""
    _, _, name = outcome.reason.rpartition(_CANCEL_REASON)
    try:
        return signal.Signals[name].value
    except KeyError:
        return signal.SIGINT.value


def run_sandboxed(
    plan: ProcessPlan, limits: Limits, profile: Profile, view: View, *, output_max: int | None
) -> Outcome:
    """Run one command to its end; SIGINT, SIGTERM and SIGHUP cancel it, whenever they come.

    Args:
        plan: the command.
        limits: what holds it.
        profile: how strongly it is confined.
        view: what of the host it sees.
        output_max: bytes of output that are passed on; the rest is read and dropped. None for all.

    Raises:
        StockadeError: the sandbox could not be set up, or was lost; or our own output takes no
            more, on a full disk for example.
    """
    packed = pack_start(SEQ, plan, limits, profile, own_stdio=True)
    with (
        _Signals() as signals,
        own_spawner(profile, view) as spawner,
        Streams(output_max) as streams,
    ):
        if signals.received:
            outcome = Outcome(Status.CANCELLED, ErrorCode.CANCELLED, profile=profile)
        else:
            spawner.start(packed, streams.for_task())
            streams.close_for_task()
            signals.cancel(spawner)
            outcome = _follow(spawner, streams)
    if streams.fault is not None:
        raise StockadeError(
            f"cannot pass on what the command printed: {streams.fault.strerror}; "
            f"{streams.copied_bytes} bytes of it came, and not all are there"
        )
    outcome = dataclasses.replace(
        outcome, output_bytes=streams.copied_bytes, output_truncated=streams.cut
    )
    if signals.received and outcome.status == "cancelled":
        name = signal.Signals(signals.received[0]).name
        outcome = dataclasses.replace(outcome, reason=f"{_CANCEL_REASON}{name}")
    return outcome


def settings_of(directory: str, profile: Profile, view: View) -> SpawnerSettings:
    """What a spawner of our own is told; ``directory``: all that it makes is in there."""
    return SpawnerSettings(
        worker_id=f"run-{os.getpid()}",
        runtime_dir=directory,
        state_dir=directory,
        supervisor_uid=os.geteuid(),
        supervisor_gid=os.getegid(),
        uid_min=UID_MIN,
        uid_max=UID_MAX,
        profile=profile,
        view=view,
        lifetime=Lifetime.EPHEMERAL,
    )


@contextlib.contextmanager
def own_spawner(profile: Profile, view: View) -> Iterator[OwnSpawner]:
    """A spawner that ends with the context, and of which nothing is left then.

    Raises:
        StockadeError: it could not be started.
    """
    with _temporary_directory() as directory:
        with _quiet_children():
            started = start_spawner(settings_of(str(directory), profile, view))
        spawner = OwnSpawner(sockets.connect_seqpacket(started.socket_path), directory)
        try:
            yield spawner
        finally:
            spawner.close()


class OwnSpawner:
    """The connection to a spawner that is ours alone, and the directory of all that it makes."""

    def __init__(self, sock: socket.socket, directory: Path) -> None:
        self.directory = directory
        self._sock = sock
        sock.settimeout(HANDSHAKE_S)
        version = importlib.metadata.version("stockade")
        self.send(Hello(version=PROTOCOL_VERSION, software=version))
        welcome = self.receive()
        if not isinstance(welcome, Welcome):
            raise SpawnerLostError(f"cannot use the spawner: it answered {welcome}")
        self._pidfd = open_pidfd(welcome.pid)
        sock.settimeout(None)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        sockets.send_packet(self._sock, encode(message), descriptors or ())

    def start(self, packed: PackedStart, stdio: Sequence[int]) -> None:
        """Asks for a task; the descriptors stay the caller's to close."""
        descriptors = packed.open_descriptors()
        try:
            self.send(packed.message, [*descriptors, *stdio])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self) -> Message:
        packet, descriptors = sockets.receive_packet(self._sock, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        for descriptor in descriptors:
            os.close(descriptor)
        if not packet:
            raise SpawnerLostError("the spawner is gone")
        message = decode(packet)
        if isinstance(message, Refused):
            raise SpawnerLostError(f"the spawner refused: {message.reason}")
        return message

    def is_readable(self) -> bool:
        """Whether a message is there."""
        return bool(select.select([self._sock], [], [], 0)[0])

    def close(self) -> None:
        """Let it go and wait until it has gone, so that nothing of it is left when we end."""
        with contextlib.suppress(OSError):
            self.send(Finish())
        self._sock.close()
        has_ended(self._pidfd, SPAWNER_EXIT_S)
        with contextlib.suppress(ChildProcessError, OSError):
            reap(self._pidfd)
        os.close(self._pidfd)


def _follow(spawner: OwnSpawner, streams: Streams) -> Outcome:
    poll = select.poll()
    poll.register(spawner, select.POLLIN)
    watched = set(streams.copies)
    for read_end in watched:
        poll.register(read_end, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor not in watched:
                outcome = _hear(spawner, streams)
                if outcome is not None:
                    return outcome
                continue
            streams.copy(descriptor)
            if descriptor not in streams.copies:
                watched.discard(descriptor)
                poll.unregister(descriptor)


def _hear(spawner: OwnSpawner, streams: Streams) -> Outcome | None:
    """Takes one message; the outcome, once all that was printed is copied."""
    message = spawner.receive()
    if isinstance(message, Unstarted):
        raise StockadeError("cannot run the command: its launcher was killed first")
    if not isinstance(message, Ended):
        return None
    for read_end in list(streams.copies):
        while streams.copy(read_end):
            pass
    spawner.send(Acknowledge(seq=SEQ))
    return message.outcome


class _Signals:
    """What asks for the end from outside. The second signal does not wait for it.

    Held from before the spawner is started until it is gone: a signal's own way to end us would
    leave it and its directory. SIGHUP that is ignored (nohup) stays so.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._spawner: OwnSpawner | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def cancel(self, spawner: OwnSpawner) -> None:
        """The task runs by this spawner now: have it cancelled by the first signal, come or not."""
        self._spawner = spawner
        if self.received:
            self._ask()

    def _handle(self, number: int, _frame: object) -> None:
        self.received.append(number)
        if len(self.received) > 1:
            raise StockadeError("interrupted")
        if self._spawner is not None:
            self._ask()

    def _ask(self) -> None:
        assert self._spawner is not None
        with contextlib.suppress(OSError):
            self._spawner.send(Cancel(seq=SEQ))


@contextlib.contextmanager
def _quiet_children() -> Iterator[None]:
    """Children started meanwhile have no stderr: ours is the command's, not the spawner's log's.

    Why a spawner could not start it tells its starter in another way.
    """
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=RUN_PREFIX))
    # As root, tasks are other users and have to get through to their work directories.
    path.chmod(0o711 if os.geteuid() == 0 else 0o700)
    try:
        yield path
    finally:
        parent = open_directory(path.parent)
        try:
            remove_tree(parent, os.fsencode(path.name))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise StockadeError(f"cannot remove {path}: {error.strerror}") from error
        finally:
            os.close(parent)
