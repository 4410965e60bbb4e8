"""That the benchmarks run and clean up after themselves, in their short form; never the figures."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_process import directories_named, eventually, processes_that_name

from stockade.platform import cgroup, proc

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TOPICS = ("spawn", "end-to-end", "live", "rows", "leaks", "attack", "output", "idle")
# What benchmarks/run makes: it has RQ, Celery and the others.
WITH_PEERS = BENCHMARKS / ".venv" / "bin" / "python"
# Where a run makes what it needs for a while.
TOPS = ("/var/tmp", "/dev/shm", "/var/lib", "/tmp")


def run(python: Path, results: Path, *topics: str) -> dict[str, Any]:
    """What a short run of these topics has written, once nothing of it is left."""
    with subprocess.Popen(
        [python, BENCHMARKS / "suite.py", "--short", "--results", results, "--only", *topics],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output[-4000:]
    name = f"stockade-bench-{process.pid}-"
    eventually(lambda: not processes_that_name(name))
    eventually(lambda: not proc.processes_of_session(process.pid))
    assert not [path for top in TOPS for path in Path(top).glob(f"{name}*")]
    mount = cgroup.find_mount()
    assert mount is None or not directories_named(mount, name)
    (written,) = results.glob("*.json")
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def check(found: dict[str, Any], topic: str) -> None:
    """The topic has rows of Stockade's, every figure is a number, every gap has its reason."""
    (one,) = (one for one in found["topics"] if one["name"] == topic)
    assert one["rows"]
    for row in one["rows"]:
        assert row["figures"], row
        assert all(math.isfinite(value) for value in row["figures"].values()), row
    assert all(one["skipped"].values()), one["skipped"]
    sections = {row["section"] for row in one["rows"]}
    assert all(set(plot["sections"]) <= sections for plot in one["plots"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("topic", TOPICS)
def test_topic_runs_and_leaves_nothing(tmp_path: Path, topic: str) -> None:
    check(run(Path(sys.executable), tmp_path, topic), topic)


@pytest.mark.timeout(300)
def test_peers_are_measured_and_plots_are_drawn_where_they_are_set_up(tmp_path: Path) -> None:
    if not WITH_PEERS.exists():
        pytest.skip("needs what benchmarks/run sets up in benchmarks/.venv")
    found = run(WITH_PEERS, tmp_path, "spawn", "idle")
    ways = {row["way"] for topic in found["topics"] for row in topic["rows"]}
    skipped = found["topics"][0]["skipped"]
    for name in ("asyncio on uvloop", "RQ", "Celery", "runexec"):
        assert (name in ways) != (name in skipped)
        assert "not installed" not in skipped.get(name, "")
    for plot in ("spawn-1", "idle-1"):
        for kind in ("svg", "png"):
            (picture,) = tmp_path.glob(f"*-{plot}.{kind}")
            assert picture.stat().st_size > 1000


def results(**figures: float) -> dict[str, Any]:
    row = {"section": "a start", "way": "Stockade", "figures": figures}
    topic = {"name": "spawn", "title": "", "rows": [row], "skipped": {}, "plots": [], "took_s": 1.0}
    facts = {"date": "2020-01-01", "version": "1", "CPU": "2 x CPU"}
    return {"name": "x", "facts": facts, "topics": [topic]}


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        ({"ratio": 1.0}, {"ratio": 1.5}, 1),
        ({"ratio": 1.5}, {"ratio": 1.0}, 0),
        ({"ratio": 1.0}, {"ratio": 1.05}, 0),
        ({"share": 0.6}, {"share": 0.4}, 1),
        ({"share": 0.4}, {"share": 0.6}, 0),
        ({"exponent": -0.01}, {"exponent": 0.2}, 1),
        # A time by itself is the machine's.
        ({"p50 ms": 1.0}, {"p50 ms": 5.0}, 0),
    ],
)
def test_compare_ends_with_1_when_a_claim_became_worse(
    tmp_path: Path, old: dict[str, float], new: dict[str, float], status: int
) -> None:
    for name, figures in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(results(**figures)))
    command = [BENCHMARKS / "compare", tmp_path / "old", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert ("claim worse" in done.stdout) == bool(status)


def test_compare_refuses_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("[]")
    command = [BENCHMARKS / "compare", tmp_path / "other", tmp_path / "other"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not results of benchmarks/run" in done.stderr


def test_exponent_is_that_of_the_growth() -> None:
    spec = importlib.util.spec_from_file_location("benchmarks_timing", BENCHMARKS / "timing.py")
    assert spec is not None
    assert spec.loader is not None
    timing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(timing)
    assert timing.exponent([(n, 3 * n**2) for n in (10, 100, 1000)]) == pytest.approx(2)
    assert timing.exponent([(n, 7) for n in (10, 100, 1000)]) == pytest.approx(0)


@pytest.mark.parametrize("name", ["docs/benchmarks.md", "README.md"])
def test_a_run_is_published_between_the_marks_of_a_document(tmp_path: Path, name: str) -> None:
    document = tmp_path / Path(name).name
    document.write_text((BENCHMARKS.parent / name).read_text())
    (tmp_path / "x.json").write_text(json.dumps(results(ratio=1.25)))
    program = (
        "import publish, sys; from pathlib import Path; from results import Results\n"
        "here, document, name = map(Path, sys.argv[1:])\n"
        "lines = publish.DOCUMENTS[name.resolve()]\n"
        "run = Results.read(here / 'x.json')\n"
        "publish.publish(run, {'spawn': ['x.svg']}, here, document, lines)"
    )
    for _ in range(2):
        command = [sys.executable, "-c", program, tmp_path, document, f"../{name}"]
        subprocess.run(command, cwd=BENCHMARKS, check=True)
    text = document.read_text()
    assert text.count("](./x.svg)") == 1
    assert text.count("2020-01-01") == 1
    assert ("| Stockade | 1.25 |" in text) == (name == "docs/benchmarks.md")
    assert text.startswith("# ")
    assert "](docs/" in text or name != "README.md"
