"""A pytest plugin: what a test needs of its host, and which tests a host could not run.

Markers skip a test, with the reason, on a host that lacks

    needs_cgroup2_controllers("memory", ...)   cgroup v2 controllers that our own tree can enable
    needs_systemd                              systemd as the running init
    needs_kernel(6, 12)                        this kernel or a newer one
    needs_root                                 uid 0
    needs_lab                                  nothing but the lab: it would harm another machine

``--lab-list FILE`` writes the node ids of the tests that were skipped so, one a line: what to run
on a lab host (``tests/lab/lab run HOST -- @FILE``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

CGROUP_MOUNTS: Final = "/proc/self/mountinfo"
_SKIPPED: Final = pytest.StashKey[list[str]]()


def cgroup2_controllers() -> frozenset[str]:
    """The controllers that cgroup v2's root offers here; none when it is not mounted."""
    for line in Path(CGROUP_MOUNTS).read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.startswith("cgroup2 "):
            try:
                text = Path(fields.split()[4], "cgroup.controllers").read_text()
            except OSError:
                return frozenset()
            return frozenset(text.split())
    return frozenset()


def lacks_controllers(*wanted: str) -> str:
    """Why a test that wants these controllers cannot run; empty when it can."""
    missing = frozenset(wanted or ("cpu", "io", "memory", "pids")) - cgroup2_controllers()
    if missing:
        return f"needs the cgroup v2 controllers {', '.join(sorted(missing))}"
    if os.geteuid() != 0:
        return "needs root: cgroups of its own"
    return ""


def lacks_systemd() -> str:
    """Why a test that wants systemd cannot run; sd_booted(3)."""
    return "" if os.path.isdir("/run/systemd/system") else "needs systemd as init"


def lacks_kernel(*version: int) -> str:
    """Why a test that wants this kernel or a newer one cannot run."""
    own = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[: len(version)])
    if own >= version:
        return ""
    return f"needs Linux {'.'.join(map(str, version))}; this is {os.uname().release}"


def lacks_root() -> str:
    """Why a test that wants root cannot run."""
    return "" if os.geteuid() == 0 else "needs root"


def lacks_lab() -> str:
    """Why a test that wants a machine to spoil cannot run."""
    return "" if os.environ.get("STOCKADE_LAB_HOST") else "needs a lab host: it may harm this one"


NEEDS: Final[dict[str, Callable[..., str]]] = {
    "needs_cgroup2_controllers": lacks_controllers,
    "needs_systemd": lacks_systemd,
    "needs_kernel": lacks_kernel,
    "needs_root": lacks_root,
    "needs_lab": lacks_lab,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("lab").addoption(
        "--lab-list",
        metavar="FILE",
        type=Path,
        help="write the node ids of tests that this host lacks something for",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, lacks in NEEDS.items():
        summary = (lacks.__doc__ or "").partition(" cannot run")[0].replace("Why a test", "a test")
        config.addinivalue_line("markers", f"{name}: {summary}; skipped on a host without")
    config.stash[_SKIPPED] = []


def missing(item: pytest.Item) -> str:
    """What this host lacks for the test; empty when it can run."""
    reasons = [
        lacks(*mark.args) for name, lacks in NEEDS.items() for mark in item.iter_markers(name)
    ]
    return "; ".join(reason for reason in reasons if reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = missing(item)
    if reason:
        item.config.stash[_SKIPPED].append(item.nodeid)
        pytest.skip(reason)


def pytest_sessionfinish(session: pytest.Session) -> None:
    skipped = session.config.stash[_SKIPPED]
    if hasattr(session.config, "workeroutput"):
        # Side by side with others (xdist): whoever hands the tests out gathers what all skipped.
        session.config.workeroutput["skipped for want"] = skipped
        return
    target: Path | None = session.config.getoption("--lab-list")
    if target is not None:
        target.write_text("".join(f"{name}\n" for name in skipped))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_SKIPPED] += getattr(node, "workeroutput", {}).get("skipped for want", [])
