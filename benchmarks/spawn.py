"""Start to exit of ``/bin/true`` in each profile, beside bare ``posix_spawn``, interleaved.

    python benchmarks/spawn.py [--repetitions N] [--sustained N] [--live N] [--json FILE]

From the supervisor's send to its receipt of the outcome, which the spawner sends when nothing of
the task lives any more. Warm: a slot waits ready. Cold: it is made for the task. bubblewrap is
measured beside them with the isolation of ``sealed``, where it is installed. Then back-to-back
starts from an empty pool, with refill and clean-up: rate and CPU time. Then a start beside many
sleeping tasks, and what each of them costs. Times are this machine's and this moment's: only the
ratios carry over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from stockade.platform import memfd, proc, sockets
from stockade.sandbox import protocol
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Profile
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.start import start_spawner

TRUE: Final = "/bin/true"
UID_MIN: Final = 1_878_000_000
UIDS: Final = 4000
# Between two measurements: the pool is refilled and used slots are cleaned up meanwhile.
PAUSE_S: Final = 0.03
BUBBLEWRAP: Final = (
    "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1",
    "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs",
    "/var/tmp", "--tmpfs", "/run", "--tmpfs", "/home", "--tmpfs", "/root", "--cap-drop", "ALL",
    TRUE,
)  # fmt: skip


class Spawner:
    """A spawner of its own and the blocking connection to it."""

    def __init__(self, profile: Profile, place: Path, *, pool: int) -> None:
        self.profile = profile
        place.mkdir(mode=0o711)
        self.settings = SpawnerSettings(
            worker_id=f"bench-{os.getpid()}-{place.name}",
            runtime_dir=str(place),
            state_dir=str(place),
            supervisor_uid=os.geteuid(),
            supervisor_gid=os.getegid(),
            uid_min=UID_MIN + UIDS * int(place.name),
            uid_max=UID_MIN + UIDS * int(place.name) + UIDS - 1,
            profile=profile,
            pool_min=pool,
            pool_max=pool,
            lifetime=Lifetime.EPHEMERAL,
        )
        self._socket = sockets.connect_seqpacket(start_spawner(self.settings).socket_path)
        self._socket.settimeout(60)
        self._send(protocol.Hello(protocol.PROTOCOL_VERSION, "benchmark"))
        welcome = self._receive()
        assert isinstance(welcome, protocol.Welcome)
        self.pid = welcome.pid
        self._seq = 0

    def _send(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> None:
        sockets.send_packet(self._socket, protocol.encode(message), fds)

    def _receive(self) -> protocol.Message:
        packet, fds = sockets.receive_packet(
            self._socket, protocol.MAX_MESSAGE_BYTES, protocol.MAX_DESCRIPTORS
        )
        for fd in fds:
            os.close(fd)
        return protocol.decode(packet)

    def start(self, *argv: str) -> int:
        self._seq += 1
        strings = (*argv, "PATH=/usr/bin:/bin")
        spec = memfd.sealed_memfd("spec", b"".join(s.encode() + b"\0" for s in strings))
        message = protocol.Start(
            seq=self._seq, argc=len(argv), envc=1, files=(), own_stdio=False, directory=None,
            profile=self.profile, limits=Limits(),
        )  # fmt: skip
        self._send(message, (spec,))
        os.close(spec)
        return self._seq

    def wait(self, seq: int, kind: type) -> Any:
        while True:
            message = self._receive()
            if isinstance(message, kind) and message.seq == seq:
                return message

    def run(self) -> float:
        """Seconds of one task; acknowledged outside of the measurement."""
        began = time.perf_counter()
        seq = self.start(TRUE)
        ended = self.wait(seq, protocol.Ended)
        took = time.perf_counter() - began
        assert ended.outcome.status == "success", ended.outcome
        self._send(protocol.Acknowledge(seq))
        return took

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def posix_spawn() -> float:
    """Seconds of the bare way."""
    began = time.perf_counter()
    pid = os.posix_spawn(TRUE, [TRUE], {"PATH": "/usr/bin:/bin"})
    os.waitpid(pid, 0)
    return time.perf_counter() - began


def bubblewrap() -> float:
    """Seconds of bubblewrap."""
    began = time.perf_counter()
    pid = os.posix_spawnp(BUBBLEWRAP[0], BUBBLEWRAP, {"PATH": "/usr/bin:/bin"})
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"bubblewrap failed with {status}"
    return time.perf_counter() - began


def interleaved(ways: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Each way once a round, in random order."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for _ in range(repetitions):
        random.shuffle(names)
        for name in names:
            time.sleep(PAUSE_S)
            taken[name].append(ways[name]())
    return taken


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children that were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def sustained(spawner: Spawner, count: int) -> dict[str, float]:
    """Back-to-back starts: rate, and CPU time of the spawner and its children for each."""
    cpu, began = cpu_s(spawner.pid), time.perf_counter()
    for _ in range(count):
        spawner.run()
    took = time.perf_counter() - began
    time.sleep(0.5)
    return {"rate": count / took, "cpu_ms": 1e3 * (cpu_s(spawner.pid) - cpu) / count}


def kernel_kb() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {name: int(value.split()[0]) for name, _, value in (x.partition(":") for x in lines)}
    return {name: found[name] for name in ("Slab", "KernelStack", "PageTables")}


def pss_kb(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total


def beside_live(spawner: Spawner, live: int, repetitions: int) -> dict[str, Any]:
    """A start beside 10 and beside many sleeping tasks, and the memory that each of them takes."""
    started: list[int] = []

    def up_to(count: int) -> None:
        while len(started) < count:
            seq = spawner.start("/bin/sleep", "600")
            started.append(spawner.wait(seq, protocol.Started).pid)

    def launchers() -> list[int]:
        return [pid for pid in proc.children(spawner.pid) if pid not in started]

    up_to(10)
    few = interleaved({"start": spawner.run}, repetitions)["start"]
    kernel, own = kernel_kb(), pss_kb([spawner.pid, *launchers()])
    up_to(live)
    many = interleaved({"start": spawner.run}, repetitions)["start"]
    grown = kernel_kb()
    per_task = (pss_kb([spawner.pid, *launchers()]) - own) / (live - 10)
    return {
        "live": live,
        "p50_ms_beside_10": 1e3 * statistics.median(few),
        "p50_ms_beside_live": 1e3 * statistics.median(many),
        "pss_kib_per_task": per_task,
        "spawner_rss_mib": int(Path(f"/proc/{spawner.pid}/statm").read_text().split()[1]) / 256,
        **{f"{name}_kib_per_task": (grown[name] - kernel[name]) / (live - 10) for name in kernel},
    }


@contextlib.contextmanager
def spawners(place: Path, wanted: dict[str, tuple[Profile, int]]) -> Iterator[dict[str, Spawner]]:
    made: dict[str, Spawner] = {}
    try:
        for number, (name, (profile, pool)) in enumerate(wanted.items(), len(os.listdir(place))):
            made[name] = Spawner(profile, place / str(number), pool=pool)
        yield made
    finally:
        for spawner in made.values():
            spawner.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--sustained", type=int, default=2000)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="stockade-bench-", dir=shared) as directory:
        place = Path(directory)
        place.chmod(0o711)
        found = measure(place, arguments)
    print(json.dumps(found, indent=1) if arguments.json is None else "")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = {
        f"{profile} {kind}": (profile, pool)
        for profile in Profile
        for kind, pool in (("warm", 2), ("cold", 0))
    }
    with spawners(place, wanted) as made:
        ways: dict[str, Callable[[], float]] = {"posix_spawn": posix_spawn}
        ways |= {name: spawner.run for name, spawner in made.items()}
        if shutil.which("bwrap"):
            ways["bubblewrap"] = bubblewrap
        interleaved(ways, 5)
        taken = interleaved(ways, arguments.repetitions)
    bare = statistics.median(taken["posix_spawn"])
    print(f"{'start to gone of /bin/true':28} {'p50 ms':>8} {'p90 ms':>8} {'ratio':>7}")
    for name, times in taken.items():
        p50, p90 = statistics.median(times), sorted(times)[len(times) * 9 // 10]
        found[name] = {"p50_ms": 1e3 * p50, "p90_ms": 1e3 * p90, "ratio": p50 / bare}
        print(f"{name:28} {1e3 * p50:8.3f} {1e3 * p90:8.3f} {p50 / bare:7.2f}")
    print(f"\n{'back to back':28} {'a second':>8} {'cpu ms':>8}")
    for profile in Profile:
        with spawners(place, {"one": (profile, 16)}) as made:
            result = sustained(made["one"], arguments.sustained)
        found[f"{profile} sustained"] = result
        print(f"{profile:28} {result['rate']:8.0f} {result['cpu_ms']:8.2f}")
    for profile in (Profile.PROCESS, Profile.SEALED):
        with spawners(place, {"one": (profile, 2)}) as made:
            found[f"{profile} live"] = live = beside_live(
                made["one"], arguments.live, max(20, arguments.repetitions // 3)
            )
        print(f"\n{profile}, beside {arguments.live} sleeping tasks")
        for name, value in live.items():
            print(f"  {name:26} {value:8.2f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
