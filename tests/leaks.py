"""A pytest plugin: what a test run must not leave behind, compared from its start to its end.

``--check-leaks`` fails a run after which anything of ours is left on the host. For runs that are
alone on it: what others start meanwhile is told, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import pytest
from worker_process import directories_named

from stockade.platform import cgroup, proc

_TEMPORARY: Final = ("stockade-",)
_DEADLINE_S: Final = 30.0
_STARTED: Final = pytest.StashKey[dict[str, set[str]]]()
_LEFT: Final = pytest.StashKey[list[str]]()


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


def left_since(before: dict[str, set[str]]) -> list[str]:
    """What there is more, a line each; a spawner that is just ending is waited for."""
    end = time.monotonic() + _DEADLINE_S
    while True:
        left = [
            f"{kind}: {one}"
            for kind, found in snapshot().items()
            for one in sorted(found - before[kind])
        ]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check-leaks", action="store_true", help="fail if anything of ours is left on the host"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Where tests run side by side (xdist), whoever hands them out looks when all are done.
    if config.getoption("--check-leaks") and not hasattr(config, "workerinput"):
        config.stash[_STARTED] = snapshot()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _STARTED in session.config.stash:
        session.config.stash[_LEFT] = left_since(session.config.stash[_STARTED])
        if session.config.stash[_LEFT]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash.get(_LEFT, None)
    if left is not None:
        terminalreporter.section("what the tests left behind")
        terminalreporter.write_line("\n".join(left) or "nothing")
