"""What machine a run was made on, without its name or its paths."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from timing import fdatasync_s
from worker import STATE_ON

from stockade.sandbox.capabilities import probe
from stockade.sandbox.profiles import Profile
from stockade.supervisor.cli.doctor import find_missing

_PYTHON_PEERS = ("uvloop", "rq", "celery", "redis", "BenchExec")
_PROGRAMS = {
    "bubblewrap": ("bwrap", "--version"),
    "redis-server": ("redis-server", "--version"),
    "docker": ("dockerd", "--version"),
    "systemd": ("systemd-run", "--version"),
    "bash": ("bash", "--version"),
}


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", text)
    name = model.group(1).strip() if model else platform.machine()
    return name + (" (a virtual machine)" if "hypervisor" in text else "")


def _memory_gib() -> float:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30), 1)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, command in _PROGRAMS.items():
        if shutil.which(command[0]) is not None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            number = re.search(r"\d+(\.\d+)*", done.stdout)
            if number is not None:
                found[name] = number.group()
    for name in _PYTHON_PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    git = ("git", "-C", str(Path(__file__).parent))
    done = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return done.stdout.strip() + (" and changes" if changed else "")


def machine() -> dict[str, Any]:
    """What decides about the figures."""
    lacking = find_missing(probe())[Profile.SEALED]
    not_enforced = [f"{entry.feature} ({entry.why})" for entry in lacking]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "version": f"{importlib.metadata.version('stockade')} ({_commit()})",
        "CPU": f"{os.cpu_count()} x {_cpu()}",
        "memory": f"{_memory_gib()} GiB",
        # What a distribution or a host appends to it is not ours to tell.
        "kernel": platform.release().partition("-")[0],
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
        "load at the start": round(os.getloadavg()[0], 2),
        "fdatasync of a page": f"{1e3 * fdatasync_s(STATE_ON):.2f} ms",
        "versions": ", ".join(f"{name} {version}" for name, version in _versions().items()),
        "not enforced by this host": "; ".join(not_enforced) or "nothing",
    }
