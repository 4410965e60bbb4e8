"""Accounts on kernels that count less: a group's files are plain files here."""

from __future__ import annotations

from pathlib import Path

import pytest

from stockade.platform.cgroup import Group
from stockade.platform.errors import SyscallError
from stockade.sandbox.accounts import read_accounts
from stockade.sandbox.ceiling import Ceiling, Hits
from stockade.sandbox.limits import MIB, Ceilings
from stockade.sandbox.slot_groups import SlotGroups
from stockade.sandbox.verdict import Accounts, PeakSource
from stockade.sandbox.watchdog import PeakSampler

ALL = frozenset({"cpu", "io", "memory", "pids"})
STALL = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n"
FILES = {
    "cpu.stat": "usage_usec 3000000\nuser_usec 2000000\nsystem_usec 1000000\n"
    "nr_periods 10\nnr_throttled 4\nthrottled_usec 250000\n",
    "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 1\n",
    "memory.peak": f"{64 * MIB}\n",
    "pids.events": "max 3\n",
    "pids.peak": "9\n",
    "io.stat": "8:0 rbytes=100 wbytes=200 rios=1 wios=1\n8:16 rbytes=1 wbytes=2 rios=1 wios=1\n",
    "cpu.pressure": STALL,
    "memory.pressure": STALL,
    "io.pressure": STALL,
}


def groups(place: Path, *without: str, ceilings: Ceilings | None = None) -> SlotGroups:
    for name in ("init", "task"):
        (place / "tasks/1" / name).mkdir(parents=True)
    for name, text in FILES.items():
        if name not in without:
            (place / "tasks/1/task" / name).write_text(text)
    ceiling = Ceiling(Group(place / "tasks"), ceilings or Ceilings(), ALL)
    return SlotGroups(place / "tasks/1", ceiling, disk=None, counts_peak=True)


def test_all_of_it_is_read(tmp_path: Path) -> None:
    assert read_accounts(groups(tmp_path), ALL, None, Hits(), ()) == Accounts(
        cpu_user_s=2.0, cpu_system_s=1.0, cpu_throttled_s=0.25, cpu_periods=10,
        cpu_periods_throttled=4, memory_peak_bytes=64 * MIB, memory_peak_source=PeakSource.KERNEL,
        processes_peak=9, io_read_bytes=101, io_write_bytes=202, stall_cpu_s=1.5,
        stall_memory_s=1.5, stall_io_s=1.5, oom_kills=2, oom_group_kills=1, own_memory_hits=1,
        tasks_max_hits=3,
    )  # fmt: skip


def test_a_peak_that_the_kernel_does_not_count_is_sampled(tmp_path: Path) -> None:
    older = groups(tmp_path, "memory.peak", "pids.peak")
    sampler = PeakSampler(older.task)
    for memory, pids in ((10, 2), (30, 5), (20, 1)):
        (tmp_path / "tasks/1/task/memory.current").write_text(f"{memory * MIB}\n")
        (tmp_path / "tasks/1/task/pids.current").write_text(f"{pids}\n")
        sampler.sample()
    found = read_accounts(older, ALL, sampler, Hits(), ())
    assert (found.memory_peak_bytes, found.memory_peak_source) == (30 * MIB, PeakSource.SAMPLED)
    assert found.processes_peak == 5


def test_what_was_never_sampled_is_not_known(tmp_path: Path) -> None:
    older = groups(tmp_path, "memory.peak", "pids.peak")
    found = read_accounts(older, ALL, PeakSampler(older.task), Hits(), ())
    assert (found.memory_peak_bytes, found.memory_peak_source) == (None, None)
    assert found.processes_peak is None


def test_a_kernel_without_pressure_tells_none(tmp_path: Path) -> None:
    older = groups(tmp_path, "cpu.pressure", "memory.pressure", "io.pressure")
    found = read_accounts(older, ALL, None, Hits(), ())
    assert (found.stall_cpu_s, found.stall_memory_s, found.stall_io_s) == (None, None, None)


def test_a_task_that_did_no_io_did_none(tmp_path: Path) -> None:
    idle = groups(tmp_path)
    (tmp_path / "tasks/1/task/io.stat").write_text("")
    found = read_accounts(idle, ALL, None, Hits(), ())
    assert (found.io_read_bytes, found.io_write_bytes) == (0, 0)
    without = read_accounts(idle, ALL - {"io"}, None, Hits(), ())
    assert (without.io_read_bytes, without.io_write_bytes) == (None, None)


def test_only_hits_of_the_ceiling_since_the_start_count(tmp_path: Path) -> None:
    held = groups(tmp_path, ceilings=Ceilings(memory_max=MIB, tasks_max=9))
    (tmp_path / "tasks/memory.events.local").write_text("oom 5\n")
    (tmp_path / "tasks/pids.events.local").write_text("max 8\n")
    found = read_accounts(held, ALL, None, Hits(memory=4, tasks=8), ())
    assert (found.ceiling_memory_hits, found.ceiling_tasks_hits) == (1, 0)


def test_a_group_that_is_gone_is_an_error(tmp_path: Path) -> None:
    ceiling = Ceiling(Group(tmp_path), Ceilings(), ALL)
    gone = SlotGroups(tmp_path / "gone", ceiling, disk=None, counts_peak=True)
    with pytest.raises(SyscallError, match="ENOENT"):
        read_accounts(gone, ALL, None, Hits(), ())


def test_the_quota_of_all_is_lifted_while_any_slot_is_killed(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("")
    ceiling = Ceiling(Group(tmp_path), Ceilings(cpu_quota=0.5), ALL)

    def quota() -> str:
        return (tmp_path / "cpu.max").read_text()

    # A plain file keeps the rest of a longer text; the kernel's do not.
    def written(text: str) -> bool:
        return quota().startswith(text)

    ceiling.lift(b"a")
    ceiling.lift(b"b")
    assert written("max 100000")
    ceiling.settle(b"a")
    ceiling.settle(b"a")
    ceiling.settle(b"never lifted")
    assert written("max 100000")
    ceiling.settle(b"b")
    assert written("50000 100000")
