"""Admission: what is promised, and the host's pressure, decide what may start."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from executor_lab import ExecutorLab, Life

from stockade.platform.pressure import host_pressure
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import Status
from stockade.supervisor.admission import Admission, cpu_stall, memory_stall
from stockade.supervisor.config_load import load
from stockade.supervisor.live_task import Phase


@pytest.fixture
def lab() -> Iterator[ExecutorLab]:
    made = ExecutorLab()
    yield made
    made.close()


def admission(**worker: str) -> Admission:
    keys = {f"worker.{name}": value for name, value in worker.items()}
    return Admission(load(None, {}, keys).config.worker)


def test_promises_add_up_to_the_ceiling_and_not_beyond() -> None:
    one = admission(memory_max="256M")
    hundred = Limits(memory_max=100 * MIB)
    for seq in (1, 2):
        assert one.has_room(hundred)
        one.promise(seq, hundred)
    assert not one.has_room(hundred)
    assert one.has_room(Limits(memory_max=56 * MIB))
    one.release(1)
    assert one.has_room(hundred)


def test_a_task_without_a_limit_is_promised_all_and_runs_alone() -> None:
    one = admission(memory_max="256M")
    unlimited = Limits(memory_max=None)
    assert one.has_room(unlimited)
    one.promise(1, unlimited)
    assert not one.has_room(Limits(memory_max=MIB))
    one.release(1)
    one.promise(2, Limits(memory_max=MIB))
    assert not one.has_room(unlimited)


def test_a_task_beyond_the_ceiling_runs_when_nothing_else_does() -> None:
    one = admission(memory_max="64M")
    assert one.has_room(Limits(memory_max=128 * MIB))


def test_processes_are_promised_with_their_launcher() -> None:
    one = admission(tasks_max="20")
    one.promise(1, Limits(tasks_max=9))
    assert one.has_room(Limits(tasks_max=9))
    assert not one.has_room(Limits(tasks_max=10))


def test_a_task_that_uses_nothing_of_the_host_always_has_room_and_takes_none() -> None:
    one = admission(memory_max="256M", tasks_max="20")
    whole = Limits(memory_max=256 * MIB, tasks_max=19)
    one.promise(1, None)
    assert one.has_room(whole)
    one.promise(2, whole)
    assert one.has_room(None)


def test_without_a_ceiling_nothing_is_counted() -> None:
    one = admission()
    assert not one.counts
    one.promise(1, Limits(memory_max=None))
    assert one.has_room(Limits(memory_max=None))


def test_queued_task_waits_for_what_is_promised_and_none_overtakes_it(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("small", "sleep 300", limits={"memory_max": "100M"})
        await life.reporter.until(lambda: "running" in life.reporter.told["small"])
        await life.dispatch("large", "true", limits={"memory_max": "200M"})
        await life.dispatch("fits", "true", limits={"memory_max": "10M"})
        assert [life.executor.find(name)[0].phase for name in ("large", "fits")] == [
            Phase.QUEUED,
            Phase.QUEUED,
        ]
        load = life.executor.load()
        assert (load.current_load, load.running_tasks) == (3, 1)
        await life.intake.cancel("small")
        ended_at = (await life.reporter.outcome("small")).finished_at
        assert ended_at is not None
        for name in ("large", "fits"):
            outcome = await life.reporter.outcome(name)
            assert outcome.status is Status.SUCCESS
            assert outcome.started_at is not None
            assert outcome.started_at >= ended_at

    lab.live(body, memory_max="256M")


def test_promises_of_tasks_from_an_earlier_life_count(lab: ExecutorLab) -> None:
    async def first(life: Life) -> None:
        await life.dispatch("kept", "sleep 300", limits={"memory_max": "200M"})
        await life.reporter.until(lambda: "running" in life.reporter.told["kept"])

    async def second(life: Life) -> None:
        await life.dispatch("waits", "true", limits={"memory_max": "100M"})
        assert life.executor.find("waits")[0].phase is Phase.QUEUED
        await life.intake.cancel("kept")
        assert (await life.reporter.outcome("waits")).status is Status.SUCCESS

    lab.live(first, memory_max="256M")
    lab.live(second, memory_max="256M")


def test_under_pressure_the_load_is_full_and_nothing_starts(lab: ExecutorLab) -> None:
    if cpu_stall() is None:
        pytest.skip("this kernel counts no pressure")

    async def body(life: Life) -> None:
        changes: list[str] = []
        while not life.admission.pressure:
            life.admission.look(lambda: changes.append(life.admission.pressure))
            await asyncio.sleep(0.1)
        assert changes == [life.admission.pressure]
        assert "pressure_cpu" in changes[0]
        await life.dispatch("waits", "true")
        assert life.executor.find("waits")[0].phase is Phase.QUEUED
        load = life.executor.load()
        assert (load.current_load, load.running_tasks) == (4, 0)

    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(8)]
    try:
        lab.live(body, pressure_cpu="0.1%")
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_pressure_that_cannot_be_read_is_what_it_was_until_it_can() -> None:
    if cpu_stall() is None:
        pytest.skip("this kernel counts no pressure")
    one = admission(pressure_memory="", pressure_cpu="100%")
    one.pressure = "pressure_cpu 100%"
    changes: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        one.look(lambda: changes.append(one.pressure))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (one.pressure, changes) == ("pressure_cpu 100%", [])
    one.look(lambda: changes.append(one.pressure))
    assert (one.pressure, changes) == ("", [""])


def test_stalls_are_those_of_proc() -> None:
    if not Path("/proc/pressure").exists():
        assert cpu_stall() is None
        assert memory_stall() is None
        return
    for stall in (cpu_stall(), memory_stall()):
        assert stall is not None
        assert 0 <= stall <= 1
    before = host_pressure("cpu")
    text = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    after = host_pressure("cpu")
    assert before is not None
    assert after is not None
    total_us = int(text.rpartition("total=")[2])
    assert before.some.total_us <= total_us <= after.some.total_us
