"""What processes cost: CPU time, memory, wake-ups, and what the kernel keeps for them."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stockade.platform import prctl, proc

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_everything() -> None:
    """Makes what other programs leave behind ours, so that its CPU time is found below us.

    A container's shim, for one, is nobody's child.
    """
    prctl.set_child_subreaper()


def reap_strays() -> None:
    """Waits for dead children that nobody else waits for; call it when nothing is being run."""
    for pid in proc.children(os.getpid()):
        one = proc.process(pid)
        if one is not None and not one.is_alive:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children that were waited for; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and everything below it, dead or alive."""
    return sum(map(process_cpu_s, [root, *proc.descendants(root)]))


def cpu_below_us_s() -> float:
    """CPU seconds of everything that we started, dead or alive, but not our own."""
    reap_strays()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = proc.descendants(os.getpid())
    return used.ru_utime + used.ru_stime + sum(map(process_cpu_s, alive))


def own_cpu_s() -> float:
    """Our own CPU seconds, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def machine_busy_s() -> float:
    """Seconds that the host's CPUs were not idle since boot: kernel threads and strangers too."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    idle, iowait = int(fields[3]), int(fields[4])
    cpus = os.cpu_count() or 1
    return cpus * time.clock_gettime(time.CLOCK_BOOTTIME) - (idle + iowait) / _TICKS_PER_S


class Activity(NamedTuple):
    """What a process has done since it started: times on a CPU, and sleeps that it woke from."""

    cpu_s: float
    wake_ups: int


def activity(pids: Iterable[int]) -> dict[int, Activity]:
    """Of each that lives; exact, where process_cpu_s counts in ticks."""
    found = {}
    for pid in pids:
        cpu_ns = sleeps = 0
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                cpu_ns += int((thread / "schedstat").read_text().split()[0])
                for line in (thread / "status").read_text().splitlines():
                    if line.startswith("voluntary_ctxt_switches"):
                        sleeps += int(line.split()[1])
        found[pid] = Activity(cpu_ns / 1e9, sleeps)
    return found


def resident_mib(pid: int) -> float:
    """Resident set of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (
        1 << 20
    )  # fmt: skip


def pss_kib(pids: Iterable[int]) -> float:
    """Memory of these processes together; shared pages count once."""
    return proc.memory_bytes(pids) / 1024


def kernel_kib() -> dict[str, int]:
    """What the kernel holds for its own use: the whole host's."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {name: int(value.split()[0]) for name, _, value in (x.partition(":") for x in lines)}
    return {name: found[name] for name in ("Slab", "KernelStack", "PageTables")}
