"""What holds a limited work directory, by host."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from test_sandbox_outline import RICH, USER

from stockade.sandbox import capabilities, quota_probe
from stockade.sandbox.capabilities import HostCapabilities, Missing
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.profiles import Feature, Profile

IN_MEMORY = Limits(memory_max=64 * MIB, workdir_max=32 * MIB)
ON_DISK = Limits(memory_max=64 * MIB, workdir_max=48 * MIB, workdir_inodes_max=9)
WITHOUT_PROJECTS = dataclasses.replace(RICH, project_quota=("it has none", "get one"))
WITHOUT_MOUNTS = dataclasses.replace(RICH, obstacles={Feature.NAMESPACES: "no mounts"})
WITHOUT_SECCOMP = dataclasses.replace(RICH, obstacles={Feature.SECCOMP: "no filters"})


def missed(limits: Limits, host: HostCapabilities) -> list[Missing]:
    found = capabilities.missing(Profile.PROCESS, limits, host)
    return [entry for entry in found if entry.feature == "workdir_max"]


@pytest.mark.parametrize(
    ("limits", "host"),
    [
        (IN_MEMORY, RICH), (IN_MEMORY, WITHOUT_PROJECTS), (IN_MEMORY, WITHOUT_SECCOMP),
        (ON_DISK, RICH), (ON_DISK, WITHOUT_MOUNTS), (Limits(), USER),
    ],
)  # fmt: skip
def test_quota_that_the_host_can_hold_is_not_missed(limits: Limits, host: HostCapabilities) -> None:
    assert missed(limits, host) == []
    assert capabilities.without_lost_quota(limits, host) == limits


@pytest.mark.parametrize(
    ("limits", "host", "why", "mend"),
    [
        (ON_DISK, WITHOUT_PROJECTS, "it has none", "raise memory_max, or get one"),
        (ON_DISK, WITHOUT_SECCOMP, "a task can leave its project", "CONFIG_SECCOMP_FILTER"),
        (IN_MEMORY, WITHOUT_MOUNTS, "no mounts", "let root mount"),
        (IN_MEMORY, USER, "only root can mount", "as root"),
        (ON_DISK, dataclasses.replace(USER, project_quota=("only root", "be root")), "only root",
         "or be root"),
    ],
)  # fmt: skip
def test_quota_that_the_host_cannot_hold_is_missed_with_its_reason(
    limits: Limits, host: HostCapabilities, why: str, mend: str
) -> None:
    (entry,) = missed(limits, host)
    assert why in entry.why
    assert mend in entry.mend
    kept = capabilities.without_lost_quota(limits, host)
    assert (kept.workdir_max, kept.workdir_inodes_max) == (None, None)


@pytest.mark.needs_root
def test_file_system_without_project_quotas_is_found_so_and_named() -> None:
    found = quota_probe.obstacle("/dev/shm")
    assert found is not None
    assert found[0].startswith("the file system of /dev/shm keeps no quotas")
    assert "prjquota" in found[1]


def test_work_directories_that_are_not_there_yet_are_looked_for_above(tmp_path: Path) -> None:
    host = capabilities.probe(str(tmp_path / "absent" / "work"))
    assert host.disk == capabilities.probe(str(tmp_path)).disk
    assert os.listdir(tmp_path) == []
    if os.geteuid() != 0:
        assert host.project_quota == ("only root can set one", "start the worker as root")
