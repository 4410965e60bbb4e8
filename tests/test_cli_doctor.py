"""``stockade doctor``: the table, and what is missing, each once."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest
from worker_process import DEADLINE_S, STOCKADE

from stockade.sandbox.capabilities import HostCapabilities, probe
from stockade.sandbox.delegation import CONTROLLERS
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature
from stockade.supervisor.cli import doctor

BARE = HostCapabilities(
    root=False,
    kernel="6.1",
    cgroup_parent=None,
    cgroup_scope=False,
    cgroup_reason="no cgroup v2 is mounted",
    cgroup_mend="boot with cgroup v2",
    lacks=dict.fromkeys(CONTROLLERS, ("no cgroup v2 is mounted", "boot with cgroup v2")),
    disk=None,
    controllers=frozenset(),
    cgroup_kill=False,
    obstacles=dict.fromkeys(
        (
            Feature.NAMESPACES, Feature.CGROUP_NAMESPACE, Feature.PRIVATE_NETWORK,
            Feature.LANDLOCK, Feature.SECCOMP,
        ),
        "the kernel refuses",
    ),
)  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOCKADE, "doctor", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def shown(host: HostCapabilities, capsys: pytest.CaptureFixture[str], **changes: object) -> str:
    host = dataclasses.replace(host, **changes)  # type: ignore[arg-type]
    doctor._print(host, doctor.find_missing(host))
    return capsys.readouterr().out


def test_table_has_each_feature_once_with_a_column_for_each_profile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(BARE, capsys, root=True).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and line[0] != " "}
    assert rows["features"] == ["process", "private", "sealed"]
    assert rows["own_uid"] == ["yes", "yes", "yes"]
    assert rows["namespaces"] == ["-", "no", "no"]
    assert rows["landlock"] == ["-", "-", "no"]
    assert set(Feature) <= set(rows)


def test_each_missing_thing_is_told_once_with_what_mends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(BARE, capsys)
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.partition("\nmissing\n")[2].split())
    for entries in doctor.find_missing(BARE).values():
        for entry in entries:
            assert words.count(f"{entry.feature}: ") + words.count(f"{entry.feature}, ") == 1
    assert words.count("to mend: start the worker as root") == 1
    assert words.count("to mend: boot with cgroup v2") == 1


def test_host_that_has_everything_is_told_nothing_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(
        BARE, capsys, root=True, cgroup_parent="/sys/fs/cgroup", cgroup_reason="",
        controllers=frozenset(CONTROLLERS), lacks={}, disk="8:0", cgroup_kill=True, obstacles={},
        project_quota=None,
    )  # fmt: skip
    assert "missing" not in text
    assert " no" not in text


def test_every_limit_is_in_one_of_the_two_lists() -> None:
    text = run().stdout
    part = text.partition("limits, in every profile\n")[2].partition("\nfeatures")[0]
    names = part.replace(",", " ").split()
    for field in dataclasses.fields(Limits):
        assert (field.name in names) == (field.name != "workdir_inodes_max")
    assert ("memory_max" in part.partition("  no ")[2]) == ("memory" not in probe().controllers)


def test_json_has_the_host_and_every_profile() -> None:
    found = json.loads(run("--json").stdout)
    assert found["host"]["kernel"] == probe().kernel
    assert set(found["profiles"]) == {"process", "private", "sealed"}
    for entry in found["profiles"].values():
        assert entry["complete"] == (not entry["missing"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "sealed"], "without --prove"),
        (["--prove", "--profile", "imaginary"], "there are process, private, sealed"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(arguments: list[str], words: str) -> None:
    ended = run(*arguments)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert words in ended.stderr
