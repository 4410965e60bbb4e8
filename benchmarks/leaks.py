"""What many tasks leave behind: 20,000 through one worker, with all that could grow watched.

    python benchmarks/leaks.py [--tasks N] [--in-flight N] [--json FILE]

A line for every twentieth part: memory (proportional set) and descriptors of the supervisor, the
spawner and the standby, the groups below the worker's and those that are dying in the whole
hierarchy (cgroup.stat), the kernel's slab, and the p50 of a task beside that of ``bash -lc true``
alone, interleaved. Ends with status 1 when something grows beyond its bound in the second half; the
first is for warming up: allocators, SQLite's cache, and the duplicate check, which remembers five
minutes. The slab is the whole host's, so it means something on a host that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import uvloop
from accounting import kernel_kib
from bare import bare_s
from worker import Running, running_worker

from stockade.platform import cgroup, proc
from stockade.platform.cgroup import Group

PARTS: Final = 20
# Interleaved pairs at each look.
PAIRS: Final = 15


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How much each figure may be larger at the end than in the middle."""

    memory_bytes: int = 4 << 20
    descriptors: int = 16
    groups: int = 60
    dying: int = 1000
    slab_bytes: int = 64 << 20
    ratio: float = 1.5


@dataclasses.dataclass
class Look:
    """One line."""

    tasks: int
    supervisor_bytes: int
    spawner_bytes: int
    standby_bytes: int
    descriptors: int
    groups: int
    dying: int
    slab_bytes: int
    task_p50_ms: float
    bare_p50_ms: float

    @property
    def ratio(self) -> float:
        return self.task_p50_ms / self.bare_p50_ms


def groups_below(spawner: int) -> tuple[int, int]:
    """Groups below the worker's own, and dying ones of the hierarchy; 0 and 0 without a tree."""
    mount, name = cgroup.find_mount(), cgroup.group_of(spawner)
    if mount is None or name is None or not name.endswith("/spawner"):
        return 0, 0
    own = Group(mount / name.lstrip("/")[: -len("/spawner")]).stat or {}
    whole = Group(mount).stat or {}
    return own.get("nr_descendants", 0), whole.get("nr_dying_descendants", 0)


async def look(running: Running, tasks: int, pairs: int) -> Look:
    task_times, bare_times = [], []
    for _ in range(pairs):
        bare_times.append(bare_s())
        task_times.append(await running.bench.task())
    active, standby = running.spawners()
    groups, dying = groups_below(active)
    return Look(
        tasks=tasks,
        supervisor_bytes=proc.memory_bytes([running.pid]),
        spawner_bytes=proc.memory_bytes([active]),
        standby_bytes=proc.memory_bytes([standby]),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (running.pid, active)),
        groups=groups,
        dying=dying,
        slab_bytes=1024 * kernel_kib()["Slab"],
        task_p50_ms=1e3 * statistics.median(task_times),
        bare_p50_ms=1e3 * statistics.median(bare_times),
    )


HEADER: Final = (
    "  tasks  supervisor  spawner  standby    fds  groups  dying    slab   p50 ms  bare ms  ratio"
)


def line(one: Look) -> str:
    mib = float(1 << 20)
    return (
        f"{one.tasks:7} {one.supervisor_bytes / mib:10.1f}M {one.spawner_bytes / mib:7.1f}M "
        f"{one.standby_bytes / mib:7.1f}M {one.descriptors:6} {one.groups:7} {one.dying:6} "
        f"{one.slab_bytes / mib:6.0f}M {one.task_p50_ms:8.2f} {one.bare_p50_ms:8.2f} "
        f"{one.ratio:6.2f}"
    )


def growth(looks: list[Look], bounds: Bounds) -> list[str]:
    """What grew beyond its bound between the warm worker and the end."""
    warm, end = looks[len(looks) // 2 - 1], looks[-1]
    found = []
    for name, bound in (
        ("supervisor_bytes", bounds.memory_bytes),
        ("spawner_bytes", bounds.memory_bytes),
        ("standby_bytes", bounds.memory_bytes),
        ("descriptors", bounds.descriptors),
        ("groups", bounds.groups),
        ("dying", bounds.dying),
        ("slab_bytes", bounds.slab_bytes),
    ):
        grown = getattr(end, name) - getattr(warm, name)
        if grown > bound:
            found.append(f"{name} grew by {grown}, the bound is {bound}")
    # The middle of several: each p50 alone is a moment's.
    early = statistics.median(one.ratio for one in looks[1 : len(looks) // 4])
    late = statistics.median(one.ratio for one in looks[-(len(looks) // 4) :])
    if late > early * bounds.ratio:
        found.append(f"a task took {early:.2f} x bash alone early and {late:.2f} x late")
    return found


async def looks_at(
    tasks: int, in_flight: int, parts: int = PARTS, pairs: int = PAIRS
) -> AsyncIterator[Look]:
    """Runs so many tasks and looks after each part of them."""
    async with running_worker(in_flight) as running:
        for part in range(1, parts + 1):
            await running.bench.burst(tasks // parts - pairs, in_flight)
            yield await look(running, part * (tasks // parts), pairs)


async def measure(tasks: int, in_flight: int) -> list[Look]:
    looks = []
    print(HEADER, flush=True)
    async for one in looks_at(tasks, in_flight):
        looks.append(one)
        print(line(one), flush=True)
    return looks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.tasks < PARTS * PAIRS * 2:
        parser.error(f"--tasks must be at least {PARTS * PAIRS * 2}")
    looks = uvloop.run(measure(arguments.tasks, arguments.in_flight))
    grown = growth(looks, Bounds())
    if arguments.json:
        found: dict[str, Any] = {
            "looks": [dataclasses.asdict(one) for one in looks],
            "growth": grown,
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    for text in grown:
        print(f"grows: {text}")
    if not grown:
        print("nothing grows")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
