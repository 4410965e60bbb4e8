"""From a dispatch over HTTP to its terminal report, beside ``bash -lc true`` alone, interleaved.

    python benchmarks/dispatch.py [--repetitions N] [--in-flight N] [--json FILE]

Starts a worker and a recording scheduler on loopback. One at a time: the p50 of each and their
ratio. Then ``--in-flight`` at once: tasks a second, beside two loops over ``bash -lc true`` in
parallel. Times are this machine's and this moment's: only the ratios carry over.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import uvloop
from bare import bare_rate, bare_s
from timing import percentile
from worker import running_worker

ROUNDS = 3


async def measure(repetitions: int, in_flight: int) -> dict[str, Any]:
    async with running_worker(in_flight) as running:
        bench = running.bench
        for _ in range(20):
            await bench.task()
            bare_s()
        tasks, bare = [], []
        for _ in range(repetitions):
            bare.append(bare_s())
            tasks.append(await bench.task())
        rates: dict[str, list[float]] = {"bare": [], "worker": []}
        for _ in range(ROUNDS):
            rates["bare"].append((await bare_rate(repetitions))[0])
            rates["worker"].append((await bench.burst(repetitions, in_flight))[0])
    return {
        "one_at_a_time": {
            "repetitions": repetitions,
            "bare_p50_ms": 1e3 * statistics.median(bare),
            "bare_p99_ms": 1e3 * percentile(bare, 0.99),
            "task_p50_ms": 1e3 * statistics.median(tasks),
            "task_p99_ms": 1e3 * percentile(tasks, 0.99),
            "p50_ratio": statistics.median(tasks) / statistics.median(bare),
        },
        "in_flight": {
            "count": in_flight,
            "bare_per_s": statistics.median(rates["bare"]),
            "tasks_per_s": statistics.median(rates["worker"]),
            "share": statistics.median(rates["worker"]) / statistics.median(rates["bare"]),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = uvloop.run(measure(arguments.repetitions, arguments.in_flight))
    one, many = found["one_at_a_time"], found["in_flight"]
    print(f"one at a time, {one['repetitions']} each, interleaved      p50 ms    p99 ms")
    for title, name in (("bash -lc true alone", "bare"), ("dispatch to terminal report", "task")):
        print(f"  {title:38} {one[name + '_p50_ms']:9.2f} {one[name + '_p99_ms']:9.2f}")
    print(f"  ratio of the p50                       {one['p50_ratio']:9.2f}")
    print(f"{many['count']} in flight")
    print(f"  bash -lc true alone, two in parallel   {many['bare_per_s']:9.0f} /s")
    print(f"  dispatch to terminal report            {many['tasks_per_s']:9.0f} /s")
    print(f"  share                                  {100 * many['share']:9.0f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
