"""What a test run must not leave behind: compared from the suite's start to its last test.

Loaded as a plugin by conftest.py, which also puts tests/test_zz_leaks.py last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
from worker_process import directories_named

from stockade.platform import cgroup, proc

_TEMPORARY: Final = ("stockade-",)
STARTED: Final = pytest.StashKey[dict[str, set[str]]]()


def _processes() -> set[str]:
    """Live processes of ours, by pid, start time and command line."""
    found = set()
    for pid, process in proc.all_processes().items():
        try:
            line = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode("utf-8", "replace")
            )
        except OSError:
            continue
        if "stockade" in f"{process} {line}" and "pytest" not in line and pid != os.getpid():
            found.add(f"{pid} {process.started_ticks} {line[:120]}")
    return found


def _cgroups() -> set[str]:
    mount = cgroup.find_mount()
    if mount is None:
        return set()
    return directories_named(Path(os.fsdecode(mount)), "stockade-")


def _mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if "stockade" in line}


def _files() -> set[str]:
    found = set()
    for directory in ("/tmp", "/var/tmp", "/dev/shm"):
        found |= {
            f"{directory}/{name}" for name in os.listdir(directory) if name.startswith(_TEMPORARY)
        }
    # A fixture of the whole session still holds its directory when the last test runs.
    return {path for path in found if not path.startswith("/tmp/stockade-launcher-")}


def _network_namespaces() -> set[str]:
    directory = Path("/run/netns")
    return {str(path) for path in directory.iterdir()} if directory.is_dir() else set()


def snapshot() -> dict[str, set[str]]:
    """Everything of ours that the host holds now, by kind."""
    return {
        "processes": _processes(),
        "cgroups": _cgroups(),
        "mounts": _mounts(),
        "files": _files(),
        "network namespaces": _network_namespaces(),
    }


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = snapshot()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The leak check runs after all else."""
    items.sort(key=lambda item: item.path.name == "test_zz_leaks.py")
