"""Measures Stockade and what people would use instead: the work behind ``benchmarks/run``.

    benchmarks/run [--only TOPIC ...] [--short] [--results DIRECTORY] [--name NAME] [--publish]

Prints a table for each topic, and writes the figures as JSON and the plots as SVG and PNG into
benchmarks/results. --publish puts the tables and plots into docs/benchmarks.md, and the
headlines' plots into the README. Times are this
machine's and this moment's: only the ratios carry over.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import facts
import plots
from publish import DOCUMENTS, publish
from results import Results
from tables import as_text
from topics import attack, end_to_end, idle, leaks, live, output, rows, spawn

HERE: Final = Path(__file__).parent
TOPICS: Final[dict[str, Any]] = {
    topic.NAME: topic for topic in (spawn, end_to_end, live, rows, leaks, attack, output, idle)
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=TOPICS, default=list(TOPICS), metavar="TOPIC",
        help=f"some of {', '.join(TOPICS)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--short", action="store_true", help="show that it runs; the figures mean nothing"
    )
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="default: benchmarks/results"
    )
    parser.add_argument("--name", help="default: the date, CPUs and kernel")
    parser.add_argument(
        "--publish",
        action="store_true",
        help="put the figures into docs/benchmarks.md and the README",
    )
    given = parser.parse_args()
    if given.publish and (given.short or set(given.only) != set(TOPICS)):
        parser.error("cannot publish a part of the topics, or --short: those are not the figures")
    return given


def main() -> int:
    given = parse()
    machine = facts.machine()
    kernel = ".".join(machine["kernel"].split(".")[:2])
    name = given.name or f"{machine['date']}-{os.cpu_count()}-cpus-linux-{kernel}"
    results = Results(name + ("-short" if given.short else ""), machine)
    given.results.mkdir(parents=True, exist_ok=True)
    if float(machine["load at the start"]) > 0.5 and not given.short:
        print(f"this machine is not quiet: load {machine['load at the start']}", file=sys.stderr)
    for topic_name, module in TOPICS.items():
        if topic_name not in given.only:
            continue
        print(f"{topic_name} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        topic = module.measure(module.SHORT if given.short else module.FULL)
        topic.took_s = round(time.monotonic() - began, 1)
        results.topics.append(topic)
        print("\n".join(as_text(topic)), flush=True)
        # Whatever comes, what was measured is kept.
        path = results.write(given.results)
    print(path)
    try:
        pictures = plots.draw(results, given.results)
    except ImportError as error:
        print(f"skipped: plots: {error}")
        pictures = {}
    if given.publish:
        for document, lines in DOCUMENTS.items():
            publish(results, pictures, given.results, document, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
