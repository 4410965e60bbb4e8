"""Where a tree can stand is found by trying, and what a killed trial left does not stay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stockade.platform import cgroup
from stockade.platform.cgroup import Group
from stockade.sandbox import systemd

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a group"),
    pytest.mark.skipif(cgroup.find_mount() is None, reason="no cgroup v2 on this host"),
    pytest.mark.skipif(systemd.is_running(), reason="here the tree is systemd's to make"),
]

FIND = """
import os, sys
from stockade.platform.cgroup import Group
from stockade.sandbox.delegation import find_delegation
Group(sys.argv[1]).attach(os.getpid())
print(find_delegation().parent)
"""


@pytest.fixture
def group() -> Iterator[Group]:
    """One that is ours, for a worker to be started in."""
    mount = cgroup.find_mount()
    assert mount is not None
    made = Group(mount / f"stockade-test-delegation-{os.getpid()}")
    made.create()
    yield made
    made.remove_tree()


def find(group: Group) -> str:
    """What a worker that is started in the group finds."""
    done = subprocess.run(
        [sys.executable, "-c", FIND, os.fsdecode(group.path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def names(group: Group) -> set[str]:
    return {os.path.basename(os.fsdecode(child.path)) for child in group.children()}


def test_what_a_killed_trial_left_is_removed_and_another_workers_is_not(group: Group) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    others = {f"stockade-probe-{os.getpid()}", "stockade-probe-x", "stockade-probe-", "1-1"}
    for name in {*others, f"stockade-probe-{ended.pid}"}:
        group.child(name).create()
    assert find(group) != "None"
    assert names(group) == others
