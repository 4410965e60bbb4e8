"""A spawner of its own, and the blocking connection that a benchmark has to it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from accounting import tree_cpu_s
from worker import PREFIX, places

from stockade.platform import memfd, sockets
from stockade.sandbox import protocol
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Profile
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner

TRUE: Final = ("/bin/true",)
UID_MIN: Final = 1_878_000_000
UIDS: Final = 4000
_numbers = itertools.count()


@contextlib.contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """What a program that is started meanwhile has to say goes there."""
    ours = os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(log)
        os.close(ours)


class Spawner:
    """One spawner with one connection.

    Args:
        profile: of its tasks.
        state: a directory for work directories.
        run: a directory for sockets and records.
        pool: how many slots wait ready; without any, each start is cold.
    """

    def __init__(self, profile: Profile, state: Path, run: Path, *, pool: int) -> None:
        self.profile = profile
        number = next(_numbers)
        for place in (state, run):
            place.mkdir(mode=0o711)
        self.settings = SpawnerSettings(
            worker_id=f"{PREFIX}{number}",
            runtime_dir=str(run),
            state_dir=str(state),
            supervisor_uid=os.geteuid(),
            supervisor_gid=os.getegid(),
            uid_min=UID_MIN + UIDS * number,
            uid_max=UID_MIN + UIDS * number + UIDS - 1,
            profile=profile,
            pool_min=pool,
            pool_max=pool,
            lifetime=Lifetime.EPHEMERAL,
        )
        with _stderr_into(run / "log"):
            started = start_spawner(self.settings)
        self._socket = sockets.connect_seqpacket(started.socket_path)
        self._socket.settimeout(60)
        self._send(protocol.Hello(protocol.PROTOCOL_VERSION, "benchmark"))
        welcome = self._receive()
        assert isinstance(welcome, protocol.Welcome)
        self.pid = welcome.pid
        self._seq = 0

    def _send(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> None:
        sockets.send_packet(self._socket, protocol.encode(message), fds)

    def _receive(self, pipes: list[int] | None = None) -> protocol.Message:
        packet, fds = sockets.receive_packet(
            self._socket, protocol.MAX_MESSAGE_BYTES, protocol.MAX_DESCRIPTORS
        )
        if pipes is None:
            for fd in fds:
                os.close(fd)
        else:
            pipes.extend(fds)
        return protocol.decode(packet)

    def start(self, *argv: str) -> int:
        """Asks for a start; gives the number that its messages carry."""
        self._seq += 1
        strings = (*argv, "PATH=/usr/bin:/bin", "HOME=/nonexistent")
        spec = memfd.sealed_memfd("spec", b"".join(s.encode() + b"\0" for s in strings))
        message = protocol.Start(
            seq=self._seq, argc=len(argv), envc=2, files=(), own_stdio=False, directory=None,
            profile=self.profile, limits=Limits(),
        )  # fmt: skip
        self._send(message, (spec,))
        os.close(spec)
        return self._seq

    def wait(self, seq: int, kind: type, pipes: list[int] | None = None) -> Any:
        while True:
            message = self._receive(pipes)
            if isinstance(message, kind) and message.seq == seq:
                return message

    def run(self, argv: Sequence[str] = TRUE) -> float:
        """Seconds of one task; acknowledged outside of the measurement."""
        began = time.perf_counter()
        seq = self.start(*argv)
        ended = self.wait(seq, protocol.Ended)
        took = time.perf_counter() - began
        assert ended.outcome.status == "success", ended.outcome
        self._send(protocol.Acknowledge(seq))
        return took

    def output(self, argv: Sequence[str]) -> bytes:
        """What a task prints, if it is little."""
        pipes: list[int] = []
        seq = self.start(*argv)
        ended = self.wait(seq, protocol.Ended, pipes)
        assert ended.outcome.status == "success", ended.outcome
        text = os.read(pipes[0], 65536)
        for fd in pipes:
            os.close(fd)
        self._send(protocol.Acknowledge(seq))
        return text

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def spawners(wanted: Mapping[str, tuple[Profile, int]]) -> Iterator[dict[str, Spawner]]:
    """Spawners by name, each of a profile and with so many slots ready."""
    made: dict[str, Spawner] = {}
    with places() as (state, run):
        try:
            for number, (name, (profile, pool)) in enumerate(wanted.items()):
                directories = (state / str(number), run / str(number))
                made[name] = Spawner(profile, *directories, pool=pool)
            yield made
        finally:
            for spawner in made.values():
                spawner.close()


# Warm: a slot waits ready. Cold: it is made for the task.
WARM_AND_COLD: Final = {
    f"{profile} {kind}": (profile, pool)
    for profile in Profile
    for kind, pool in (("warm", 2), ("cold", 0))
}


def sustained(spawner: Spawner, count: int) -> tuple[float, float]:
    """Back-to-back starts: how many a second, and CPU milliseconds of the spawner for each."""
    cpu, began = tree_cpu_s(spawner.pid), time.perf_counter()
    for _ in range(count):
        spawner.run()
    took = time.perf_counter() - began
    # What refills the pool and cleans up afterwards counts too.
    time.sleep(0.5)
    return count / took, 1e3 * (tree_cpu_s(spawner.pid) - cpu) / count
