"""What it costs to run a program: time and CPU, beside every other way that this host has."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Final

import containers
import redis_peers
import ways
from accounting import cpu_below_us_s, machine_busy_s, own_cpu_s, own_everything
from results import Plot, Topic
from spawner import WARM_AND_COLD, spawners, sustained
from timing import interleaved, milliseconds
from ways import UnavailableError, Way

from stockade.sandbox.profiles import Profile

NAME: Final = "spawn"
TITLE: Final = "What a start costs"
TRUE: Final = ("/bin/true",)
BASH: Final = ("/bin/bash", "-lc", "true")
BARE: Final = "posix_spawn"
BALLAST_BYTES: Final = 1 << 30
EXIT: Final = "start to exit of {}"
FIRST: Final = "start to first instruction"
BIG: Final = "start to exit of /bin/true from a supervisor of 1 GiB"


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often.

    Attributes:
        rounds: of /bin/true.
        rounds_more: of every other comparison.
        batches: of back-to-back runs, for CPU time.
        batch: runs in each.
        sustained: starts in one go.
    """

    rounds: int
    rounds_more: int
    batches: int
    batch: int
    sustained: int


FULL: Final = Counts(rounds=300, rounds_more=100, batches=10, batch=25, sustained=2000)
SHORT: Final = Counts(rounds=2, rounds_more=2, batches=1, batch=2, sustained=5)


@contextlib.contextmanager
def _all_ways(topic: Topic, stamp: str | None) -> Iterator[dict[str, Way]]:
    """Everything that can run here; the rest is noted as skipped."""
    found = {
        BARE: Way(ways.posix_spawn, ways.plain_output),
        "subprocess.run": Way(ways.subprocess_run, ways.subprocess_output),
        "fork with preexec_fn": Way(ways.preexec, ways.preexec_output),
    }
    with ExitStack() as stack:
        made = stack.enter_context(spawners(WARM_AND_COLD))
        found |= {f"Stockade {name}": Way(one.run, one.output) for name, one in made.items()}

        def add(name: str, way: AbstractContextManager[Way]) -> None:
            try:
                found[name] = stack.enter_context(way)
            except UnavailableError as error:
                topic.skipped[name] = str(error)

        add("Stockade's hops in C", ways.hops())
        add("asyncio on uvloop", ways.uvloop_subprocess())
        add("bubblewrap", ways.bubblewrap())
        add("runexec", containers.runexec())
        try:
            socket, _ = stack.enter_context(redis_peers.redis_server())
        except UnavailableError as error:
            topic.skipped |= dict.fromkeys(redis_peers.PEERS, str(error))
        else:
            for name in redis_peers.PEERS:
                add(name, redis_peers.way(name, socket))
        add("docker run", containers.docker(stamp))
        add("systemd-run", ways.systemd_run())
        yield found


def _compare(
    topic: Topic, section: str, runs: dict[str, Callable[[], float]], rounds: int,
    every: dict[str, int],
) -> None:  # fmt: skip
    """A row for each way, with its ratio to the bare one."""
    # Everyone's first runs are not like the rest.
    interleaved(runs, min(3, rounds))
    taken = interleaved(runs, rounds, every)
    bare = statistics.median(taken[BARE])
    for name, times in taken.items():
        figures = milliseconds(times)
        topic.add_all(section, name, {**figures, "ratio": statistics.median(times) / bare})


def _first_instruction(way: Way, stamp: str) -> float:
    began = time.monotonic_ns()
    return (int(way.output((stamp,))) - began) / 1e9


def _cpu(topic: Topic, found: dict[str, Way], counts: Counts) -> None:
    """CPU time of all that takes part, in batches in turn, with what it does afterwards."""
    section = "CPU time of each /bin/true, back to back"
    began, busy = time.monotonic(), machine_busy_s()
    time.sleep(0.3 * counts.batches)
    idle = (machine_busy_s() - busy) / (time.monotonic() - began)
    # Without a pause there is no warm slot for each, so warm and cold are nearly the same.
    names = [name for name in found if not name.endswith(" cold")]
    used = {name: [0.0, 0.0] for name in names}
    runs = dict.fromkeys(names, 0)
    for _ in range(counts.batches):
        for name in names:
            way = found[name]
            batch = max(1, counts.batch // way.every)
            cpu, busy = cpu_below_us_s() + own_cpu_s(), machine_busy_s()
            began = time.monotonic()
            for _ in range(batch):
                way.run(TRUE)
            time.sleep(0.3)
            used[name][0] += cpu_below_us_s() + own_cpu_s() - cpu
            used[name][1] += machine_busy_s() - busy - idle * (time.monotonic() - began)
            runs[name] += batch
    bare = used[BARE][0] / runs[BARE]
    for name in names:
        cpu, busy = (seconds / runs[name] for seconds in used[name])
        ratio = {"ratio": cpu / bare} if bare else {}
        topic.add_all(
            section, name, {"CPU ms": 1e3 * cpu, "machine ms": 1e3 * busy, "n": runs[name], **ratio}
        )


@contextlib.contextmanager
def _ballast() -> Iterator[None]:
    """Makes this process a large one, in pages as a long-lived heap has them."""
    # Private: a fork copies the page tables of nothing that is shared.
    with mmap.mmap(-1, BALLAST_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for offset in range(0, BALLAST_BYTES, mmap.PAGESIZE):
            memory[offset] = 1
        yield


def measure(counts: Counts) -> Topic:
    own_everything()
    topic = Topic(NAME, TITLE)
    with ExitStack() as stack:
        stamp = None
        try:
            stamp = stack.enter_context(ways.stamp())
        except UnavailableError as error:
            topic.skipped[FIRST] = str(error)
        found = stack.enter_context(_all_ways(topic, stamp))
        every = {name: way.every for name, way in found.items()}
        for argv, rounds in ((TRUE, counts.rounds), (BASH, counts.rounds_more)):
            runs: dict[str, Callable[[], float]] = {
                name: _run(way, argv) for name, way in found.items()
            }
            _compare(topic, EXIT.format(" ".join(argv)), runs, rounds, every)
        if stamp is not None:
            firsts: dict[str, Callable[[], float]] = {
                name: _first(way, stamp) for name, way in found.items()
            }
            _compare(topic, FIRST, firsts, counts.rounds_more, every)
        _cpu(topic, found, counts)
        with _ballast():
            quick = {name: _run(way, TRUE) for name, way in found.items() if way.every == 1}
            _compare(topic, BIG, quick, counts.rounds_more, {})
    for profile in Profile:
        with spawners({"one": (profile, 16)}) as made:
            rate, cpu_ms = sustained(made["one"], counts.sustained)
        figures = {"tasks/s": rate, "CPU ms": cpu_ms, "n": counts.sustained}
        topic.add_all("back to back, refill and clean-up included", f"Stockade {profile}", figures)
    topic.plots = [
        Plot("Start to exit, milliseconds", "p50 ms", (EXIT.format("/bin/true"), BIG)),
        Plot("Start to exit, over posix_spawn", "ratio", (EXIT.format("/bin/true"),)),
    ]
    return topic


def _run(way: Way, argv: tuple[str, ...]) -> Callable[[], float]:
    program = way.shell if argv == BASH else argv[0]
    return lambda: way.run((program, *argv[1:]))


def _first(way: Way, stamp: str) -> Callable[[], float]:
    return lambda: _first_instruction(way, stamp)
