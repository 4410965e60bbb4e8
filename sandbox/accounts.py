"""What a task used: read from its group's files before the group is removed, or sampled."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from stockade.platform.errors import SyscallError
from stockade.platform.pressure import Pressure
from stockade.sandbox.ceiling import Hits
from stockade.sandbox.slot_groups import SlotGroups
from stockade.sandbox.verdict import Accounts, PeakSource
from stockade.sandbox.watchdog import Sampler

log = logging.getLogger(__name__)


def accounts_of(
    groups: SlotGroups | None, controllers: frozenset[str], sampler: Sampler | None,
    before: Hits, survivors: tuple[int, ...],
) -> Accounts:  # fmt: skip
    """All that is known of what a task used.

    Args:
        groups: the slot's, not removed yet; None without a tree.
        controllers: what its groups have.
        sampler: what was sampled, where the kernel does not count.
        before: the ceiling's hits when the task began.
        survivors: what could not be killed.
    """
    if groups is not None:
        try:
            return read_accounts(groups, controllers, sampler, before, survivors)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            log.warning("the group %s is gone: its accounts are lost", groups.path)
    peak, source = _sampled_peak(sampler)
    processes = sampler.processes_peak or None if sampler is not None else None
    return Accounts(
        memory_peak_bytes=peak, memory_peak_source=source, processes_peak=processes,
        survivors=survivors,
    )  # fmt: skip


def read_accounts(
    groups: SlotGroups, controllers: frozenset[str], sampler: Sampler | None,
    before: Hits, survivors: tuple[int, ...],
) -> Accounts:  # fmt: skip
    """All that is counted of the task in ``groups``; arguments as for accounts_of.

    Raises:
        SyscallError: ENOENT or ENODEV; the group is gone, and the accounts with it.
    """
    task = groups.task
    cpu = task.cpu_stat
    if cpu is None:
        # Every group has this file, with the controller or without.
        raise SyscallError("read", repr(task), errno.ENOENT)
    memory = (task.memory_events if "memory" in controllers else None) or {}
    pids = (task.pids_events if "pids" in controllers else None) or {}
    io = task.io_stat if "io" in controllers else None
    peak, source = _peak(groups, controllers, sampler)
    processes = task.pids_peak if "pids" in controllers else None
    if processes is None and sampler is not None:
        processes = sampler.processes_peak or None
    after = groups.ceiling.hits()
    return Accounts(
        cpu_user_s=_seconds(cpu, "user_usec"),
        cpu_system_s=_seconds(cpu, "system_usec"),
        cpu_throttled_s=_seconds(cpu, "throttled_usec"),
        cpu_periods=cpu.get("nr_periods", 0),
        cpu_periods_throttled=cpu.get("nr_throttled", 0),
        memory_peak_bytes=peak,
        memory_peak_source=source,
        processes_peak=processes,
        io_read_bytes=_of_all_devices(io, "rbytes"),
        io_write_bytes=_of_all_devices(io, "wbytes"),
        stall_cpu_s=_stall(lambda: task.cpu_pressure),
        stall_memory_s=_stall(lambda: task.memory_pressure),
        stall_io_s=_stall(lambda: task.io_pressure),
        oom_kills=memory.get("oom_kill", 0),
        oom_group_kills=memory.get("oom_group_kill", 0),
        own_memory_hits=memory.get("oom", 0),
        ceiling_memory_hits=after.memory - before.memory,
        tasks_max_hits=pids.get("max", 0),
        ceiling_tasks_hits=after.tasks - before.tasks,
        survivors=survivors,
    )


def _peak(
    groups: SlotGroups, controllers: frozenset[str], sampler: Sampler | None
) -> tuple[int | None, PeakSource | None]:
    counted = groups.task.memory_peak if "memory" in controllers else None
    if counted is not None:
        return counted, PeakSource.KERNEL
    return _sampled_peak(sampler)


def _sampled_peak(sampler: Sampler | None) -> tuple[int | None, PeakSource | None]:
    """The most memory that was seen, if any was."""
    if sampler is None or not sampler.memory_peak_bytes:
        return None, None
    return sampler.memory_peak_bytes, PeakSource.SAMPLED


def _seconds(table: dict[str, int], name: str) -> float | None:
    return table[name] / 1e6 if name in table else None


def _of_all_devices(table: dict[str, dict[str, int]] | None, name: str) -> int | None:
    # A group that did no I/O has an empty file: nothing was read, which is known.
    return None if table is None else sum(device.get(name, 0) for device in table.values())


def _stall(read: Callable[[], Pressure | None]) -> float | None:
    try:
        pressure = read()
    except OSError as error:
        # Switched off for the host (psi=0) or for this group (cgroup.pressure).
        if error.errno == errno.EOPNOTSUPP:
            return None
        raise
    return None if pressure is None else pressure.some.total_us / 1e6
