"""``stockade run --plan``, against what a task that is really run finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE_S, STOCKADE

from stockade.platform import cgroup
from stockade.sandbox.capabilities import probe
from stockade.sandbox.profiles import PROFILES, Feature


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOCKADE, "run", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def plan(*arguments: str) -> dict[str, Any]:
    ended = run("--plan", "--json", *arguments)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_plan_runs_nothing_and_leaves_nothing(
    profile: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(place))
    ended = run("--plan", "--profile", profile, "--", "/usr/bin/touch", str(place / "made"))
    assert ended.returncode == 0, ended.stderr
    assert "exec: execute /usr/bin/touch" in ended.stdout
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("profile", PROFILES)
def test_task_finds_itself_confined_as_planned(profile: str) -> None:
    told = plan("--profile", profile, "--limit-nofile", "77", "--", "true")
    text = json.dumps(told["steps"])
    script = (
        "ulimit -n; grep -c '^Seccomp:.2' /proc/self/status; cut -d' ' -f5 /proc/self/mountinfo;"
        "ls /proc/self/ns -l | grep -o '[a-z_]*:.[0-9]*'; pwd"
    )
    lines = run("--profile", profile, "--limit-nofile", "77", "--", "bash", "-c", script)
    seen = lines.stdout.splitlines()
    assert "RLIMIT_NOFILE = 77:77" in text
    assert seen[0] == "77"
    assert int(seen[1]) == ("filter system calls" in text)
    for target in re.findall(r"mount (?:a )?new (/dev/shm|/dev|/tmp)\b", text):
        assert target in seen
    born = re.search(r"be born in new namespaces: ([a-z, ]*)", text)
    for name in born[1].split(", ") if born else ():
        own = os.readlink(f"/proc/self/ns/{ {'mount': 'mnt'}.get(name, name) }")
        assert own not in seen, name
    entered = re.search(r"directory: enter ([^\"]*)", text)
    assert entered
    assert seen[-1].startswith(entered[1].partition("NAME")[0])


@pytest.mark.skipif(probe().cgroup_parent is None, reason="needs a cgroup v2 tree of its own")
def test_kernel_files_hold_the_planned_values_while_the_task_runs() -> None:
    limits = ["--memory-max", "64M", "--cpu-quota", "50%", "--cpu-weight", "20"]
    told = plan(*limits, "--", "true")
    lines = next(s["details"] for s in told["steps"] if s["does"] == "make a cgroup")[1:]
    mount = cgroup.find_mount()
    assert mount is not None
    with subprocess.Popen(
        [*STOCKADE, "run", *limits, "--", "sh", "-c", "echo begun; cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        (slot,) = mount.glob(f"**/stockade-run-{process.pid}.scope/tasks/*/")
        for line in lines:
            name, equals, value = line.removeprefix("mkdir ").partition(" = ")
            path = slot / Path(name).relative_to("SLOT")
            assert path.exists(), line
            if equals and "subtree_control" not in name:
                assert path.read_text().strip() == value, line
        process.communicate()
    assert any("max.descendants" in line for line in lines)


def test_plan_says_what_this_host_cannot_enforce() -> None:
    told = plan("--profile", "sealed", "--", "true")
    lacking = {entry["feature"] for entry in told["missing"]}
    host = probe()
    assert ("memory_max" in lacking) == ("memory" not in host.controllers)
    assert (Feature.LANDLOCK in lacking) == (Feature.LANDLOCK not in host.available)
    text = run("--plan", "--profile", "sealed", "--", "true").stdout
    for feature in lacking:
        assert f"  {feature}: " in text.partition("not enforced on this host")[2]


def test_wrong_arguments_are_refused_as_without_plan() -> None:
    ended = run("--plan", "--profile", "imaginary", "--", "true")
    assert (ended.returncode, ended.stdout) == (125, "")
    assert "there are process, private, sealed" in ended.stderr
