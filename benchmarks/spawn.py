"""Start to exit of ``/bin/true`` in each profile, beside bare ``posix_spawn``, interleaved.

    python benchmarks/spawn.py [--repetitions N] [--sustained N] [--live N] [--json FILE]

From the supervisor's send to its receipt of the outcome, which the spawner sends when nothing of
the task lives any more. Warm: a slot waits ready. Cold: it is made for the task. bubblewrap is
measured beside them with the isolation of ``sealed``, where it is installed. Then back-to-back
starts from an empty pool, with refill and clean-up: rate and CPU time. Then a start beside many
sleeping tasks, and what each of them costs. Times are this machine's and this moment's: only the
ratios carry over. ``benchmarks/run`` measures all this beside more peers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ways
from beside_live import BesideLive
from spawner import TRUE, WARM_AND_COLD, spawners, sustained
from timing import interleaved

from stockade.sandbox.profiles import Profile


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=300)
    parser.add_argument("--sustained", type=int, default=2000)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=1) if arguments.json is None else "")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(spawners(WARM_AND_COLD))
        runs: dict[str, Callable[[], float]] = {"posix_spawn": lambda: ways.posix_spawn(TRUE)}
        runs |= {name: spawner.run for name, spawner in made.items()}
        with contextlib.suppress(ways.UnavailableError):
            bubblewrap = stack.enter_context(ways.bubblewrap())
            runs["bubblewrap"] = lambda: bubblewrap.run(TRUE)
        interleaved(runs, 5)
        taken = interleaved(runs, arguments.repetitions)
    bare = statistics.median(taken["posix_spawn"])
    print(f"{'start to gone of /bin/true':28} {'p50 ms':>8} {'p90 ms':>8} {'ratio':>7}")
    for name, times in taken.items():
        p50, p90 = statistics.median(times), sorted(times)[len(times) * 9 // 10]
        found[name] = {"p50_ms": 1e3 * p50, "p90_ms": 1e3 * p90, "ratio": p50 / bare}
        print(f"{name:28} {1e3 * p50:8.3f} {1e3 * p90:8.3f} {p50 / bare:7.2f}")
    print(f"\n{'back to back':28} {'a second':>8} {'cpu ms':>8}")
    for profile in Profile:
        with spawners({"one": (profile, 16)}) as made:
            rate, cpu_ms = sustained(made["one"], arguments.sustained)
        found[f"{profile} sustained"] = {"rate": rate, "cpu_ms": cpu_ms}
        print(f"{profile:28} {rate:8.0f} {cpu_ms:8.2f}")
    for profile in (Profile.PROCESS, Profile.SEALED):
        found[f"{profile} live"] = live = beside_live(
            profile, arguments.live, max(20, arguments.repetitions // 3)
        )
        print(f"\n{profile}, beside {arguments.live} sleeping tasks")
        for name, value in live.items():
            print(f"  {name:26} {value:8.2f}")
    return found


def beside_live(profile: Profile, live: int, repetitions: int) -> dict[str, Any]:
    """A start beside 10 and beside many sleeping tasks, and the memory that each of them takes."""
    with spawners({"one": (profile, 2)}) as made:
        beside = BesideLive(made["one"])
        beside.up_to(10)
        few = statistics.median(beside.starts(repetitions))
        beside.weigh()
        beside.up_to(live)
        many = statistics.median(beside.starts(repetitions))
        return {
            "live": live,
            "p50_ms_beside_10": 1e3 * few,
            "p50_ms_beside_live": 1e3 * many,
            **beside.grown_kib_per_task(),
            "spawner_rss_mib": beside.spawner_mib(),
        }


if __name__ == "__main__":
    sys.exit(main())
