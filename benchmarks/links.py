"""From a dispatch to its terminal report over each link, side by side.

    python benchmarks/links.py [--repetitions N] [--in-flight N ...] [--json FILE]

One worker serves http and grpc at once, each with a scheduler of its own on loopback that takes the
reports and dials as the real ones do: http over kept connections, grpc over a new one each time.
The links take turns, so that what disturbs one disturbs the other.
Times are this machine's and this moment's: only the ratios carry over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any, Final

import uvloop
from timing import percentile
from worker import LINKS, running_worker

ROUNDS: Final = 3


async def measure(repetitions: int, in_flights: list[int]) -> list[dict[str, Any]]:
    found = []
    async with running_worker(max(in_flights), links=tuple(LINKS)) as running:
        for bench in running.benches.values():
            await bench.burst(20, 4)
        for in_flight in in_flights:
            rates: dict[str, list[float]] = {name: [] for name in running.benches}
            times: dict[str, list[float]] = {name: [] for name in running.benches}
            for _ in range(ROUNDS):
                for name, bench in running.benches.items():
                    rate, each = await bench.burst(max(repetitions // ROUNDS, 1), in_flight)
                    rates[name].append(rate)
                    times[name] += each
            found += [
                {
                    "link": name,
                    "in_flight": in_flight,
                    "tasks": len(times[name]),
                    "p50_ms": 1e3 * statistics.median(times[name]),
                    "p99_ms": 1e3 * percentile(times[name], 0.99),
                    "tasks_per_s": statistics.median(rates[name]),
                }
                for name in running.benches
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = uvloop.run(measure(arguments.repetitions, arguments.in_flight))
    print("dispatch to terminal report   in flight     p50 ms     p99 ms    tasks/s   rate of http")
    base = {one["in_flight"]: one["tasks_per_s"] for one in found if one["link"] == "http"}
    for one in found:
        ratio = one["tasks_per_s"] / base[one["in_flight"]]
        print(
            f"{one['link']:28} {one['in_flight']:10} {one['p50_ms']:10.2f} {one['p99_ms']:10.2f}"
            f" {one['tasks_per_s']:10.0f} {ratio:14.2f}"
        )
    if arguments.json:
        facts = {"machine": os.uname().machine, "kernel": os.uname().release, "found": found}
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
