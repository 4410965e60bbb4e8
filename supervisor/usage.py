"""What live tasks use at this moment: CPU time, memory and processes, by a look at /proc."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Final

import psutil

from stockade.platform import proc

LAUNCHER: Final = "stockade-launcher"


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """One task's processes together; what has ended before is not in it.

    Attributes:
        cpu_s: CPU time that they have used so far.
        memory_bytes: their resident memory; pages that they share count for each.
    """

    cpu_s: float = 0.0
    memory_bytes: int = 0
    processes: int = 0


def sample(main_pids: Mapping[int, int]) -> dict[int, Usage]:
    """What each task uses; those that have ended meanwhile are missing. One walk over /proc.

    Args:
        main_pids: the pid of each task's main process, by any key.
    """
    parents = {pid: one.parent for pid, one in proc.all_processes().items()}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    return {
        key: _sum(_family(pid, parents[pid], children))
        for key, pid in main_pids.items()
        if pid in parents
    }


def _family(pid: int, parent: int, children: Mapping[int, list[int]]) -> list[int]:
    """A task's processes: all that its launcher, which reaps its orphans, has below it."""
    family = list(children[parent]) if _is_launcher(parent) else [pid]
    seen = set(family)
    for member in family:  # grows while it is walked
        new = [child for child in children.get(member, ()) if child not in seen]
        seen.update(new)
        family.extend(new)
    return family


def _is_launcher(pid: int) -> bool:
    # When the launcher was killed, the task's parent is a spawner, with all other tasks below it.
    try:
        return psutil.Process(pid).cmdline()[:1] == [LAUNCHER]
    except psutil.Error:
        return False


def _sum(pids: list[int]) -> Usage:
    cpu_s, memory_bytes, processes = 0.0, 0, 0
    for pid in pids:
        # It may end at any moment; then it uses nothing.
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                memory_bytes += process.memory_info().rss
            cpu_s += times.user + times.system
            processes += 1
    return Usage(cpu_s, memory_bytes, processes)
