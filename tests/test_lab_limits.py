"""Limits, ceilings, verdicts and accounts, on hosts whose kernel has all of cgroup v2."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, eventually, kill_now
from test_lab_host import ALLOCATE, MIB, tree_of

from stockade.platform import devices, proc
from stockade.sandbox.limits import Ceilings, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status

pytestmark = pytest.mark.needs_cgroup2_controllers

LOOPS = "trap '' TERM; for i in $(seq {0}); do (while :; do :; done) & done; echo on; wait"
MakeClient = Callable[..., SpawnerClient]


@pytest.fixture
def make() -> Iterator[MakeClient]:
    clients: list[SpawnerClient] = []

    def make_client(**settings: object) -> SpawnerClient:
        clients.append(SpawnerClient(**settings))  # type: ignore[arg-type]
        return clients[-1]

    yield make_client
    for client in clients:
        client.close()


@pytest.fixture
def client(make: MakeClient) -> SpawnerClient:
    return make()


def task_group(client: SpawnerClient, seq: int) -> Path:
    """The group of the live task; its main process is in it."""
    pid = client.wait_started(seq)
    (found,) = [
        path.parent
        for path in tree_of(client).glob("tasks/*/task/cgroup.procs")
        if str(pid) in path.read_text().split()
    ]
    return found


def cancel(client: SpawnerClient, seq: int) -> Outcome:
    client.cancel(seq)
    return client.wait_ended(seq)


def test_every_limit_is_in_its_file(client: SpawnerClient) -> None:
    disk = devices.disk_of(client.settings.state_dir)
    assert disk is not None, "the lab's work directories are on a disk"
    limits = Limits(
        memory_max=64 * MIB, memory_high=48 * MIB, memory_swap_max=MIB, cpu_quota=0.5,
        cpu_weight=50, tasks_max=20, io_weight=30, io_read_bandwidth_max=4 * MIB,
        io_write_bandwidth_max=2 * MIB,
    )  # fmt: skip
    client.start(1, ["/bin/sleep", "300"], limits)
    group = task_group(client, 1)
    found = {
        name: (group / name).read_text().strip()
        for name in (
            "memory.max", "memory.high", "memory.swap.max", "memory.oom.group", "cpu.max",
            "cpu.weight", "pids.max", "io.weight", "io.max", "cgroup.max.descendants",
        )
    }  # fmt: skip
    assert found == {
        "memory.max": str(64 * MIB),
        "memory.high": str(48 * MIB),
        "memory.swap.max": str(MIB),
        "memory.oom.group": "1",
        "cpu.max": "50000 100000",
        "cpu.weight": "50",
        "pids.max": "20",
        "io.weight": "default 30",
        "io.max": f"{disk} rbps={4 * MIB} wbps={2 * MIB} riops=max wiops=max",
        "cgroup.max.descendants": "0",
    }
    assert cancel(client, 1).degraded == ()
    client.start(2, ["/bin/sleep", "300"], Limits(oom_policy="continue"))
    assert (task_group(client, 2) / "memory.oom.group").read_text() == "0\n"
    cancel(client, 2)


def test_write_bandwidth_is_held_and_counted(client: SpawnerClient) -> None:
    script = "dd if=/dev/zero of=f bs=256k count=16 oflag=direct 2>/dev/null; rm f"
    slow, _ = client.run(1, script, Limits(io_write_bandwidth_max=MIB))
    assert slow.status is Status.SUCCESS
    assert slow.io_write_bytes is not None
    assert slow.io_write_bytes >= 4 * MIB
    # Four mebibytes at one a second, but for what the first moment lets through.
    assert slow.wall_s is not None
    assert slow.wall_s > 2


def test_four_processes_that_together_pass_the_limit_are_killed_together(
    client: SpawnerClient,
) -> None:
    script = f"for i in 1 2 3 4; do {ALLOCATE.format(24, 60)} & done; wait"
    outcome, _ = client.run(1, script, Limits(memory_max=64 * MIB, runtime_max=120))
    assert outcome.error_code is ErrorCode.OOM_KILLED
    # Victims of one kill; on a slow host not all four had begun.
    victims = int(outcome.reason.split("M, ")[1].split()[0])
    assert victims >= 2, outcome.reason


def test_a_tmpfs_that_fills_up_is_the_tasks_memory(client: SpawnerClient) -> None:
    script = "f=/dev/shm/stockade-test-$$; trap 'rm -f $f' EXIT; head -c 200M /dev/zero >$f"
    try:
        outcome, _ = client.run(1, script, Limits(memory_max=64 * MIB, runtime_max=120))
        assert outcome.error_code is ErrorCode.OOM_KILLED, outcome
        assert outcome.reason.startswith("killed: memory_max 64M reached")
    finally:
        for path in Path("/dev/shm").glob("stockade-test-*"):
            path.unlink()


@pytest.fixture
def swap() -> Iterator[None]:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", prefix="stockade-swap-") as file:
        subprocess.run(["dd", "if=/dev/zero", f"of={file.name}", "bs=1M", "count=256"],
                       check=True, stderr=subprocess.DEVNULL)  # fmt: skip
        os.chmod(file.name, 0o600)
        subprocess.run(["mkswap", file.name], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["swapon", file.name], check=True)
        yield
        subprocess.run(["swapoff", file.name], check=True)


@pytest.mark.needs_lab
@pytest.mark.usefixtures("swap")
def test_with_swap_on_the_limit_holds_and_memory_swap_max_extends_it(client: SpawnerClient) -> None:
    allocate = f"exec {ALLOCATE.format(110, 1)}"
    held, _ = client.run(1, allocate, Limits(memory_max=64 * MIB, runtime_max=120))
    assert held.error_code is ErrorCode.OOM_KILLED
    extended, _ = client.run(
        2, allocate, Limits(memory_max=64 * MIB, memory_swap_max=128 * MIB, runtime_max=240)
    )
    assert extended.status is Status.SUCCESS, extended


def kill_time_s(client: SpawnerClient, seq: int, quota: str) -> float:
    """How long the kill of forty loops takes, from the cancel to the outcome."""
    limits = Limits(timeout_stop=0.0, runtime_max=600)
    client.start(seq, ["/bin/bash", "-c", LOOPS.format(40)], limits)
    group = task_group(client, seq)
    eventually(lambda: len((group / "cgroup.procs").read_text().split()) == 41, 120)
    # Only now: under a tiny quota forty loops take minutes to come to be.
    (group / "cpu.max").write_text(quota)
    began = time.monotonic()
    outcome = cancel(client, seq)
    assert outcome.status is Status.CANCELLED
    return time.monotonic() - began


def test_forty_loops_under_a_tiny_quota_die_as_fast_as_without_one(client: SpawnerClient) -> None:
    free_s = kill_time_s(client, 1, "max 100000")
    throttled_s = kill_time_s(client, 2, "1000 100000")
    # Under its quota each would wait for its turn, for many seconds in all.
    assert throttled_s < max(1.0, 3 * free_s), (throttled_s, free_s)


# The worker's ceiling.


def test_all_tasks_together_cannot_pass_the_workers_memory_max(make: MakeClient) -> None:
    client = make(ceilings=Ceilings(memory_max=96 * MIB))
    limits = Limits(memory_max=80 * MIB, runtime_max=120)
    for seq in (1, 2):
        client.start(seq, ["/usr/bin/python3", "-c", "import time; x = bytearray(60 << 20); "
                           "time.sleep(20)"], limits)  # fmt: skip
    outcomes = [client.wait_ended(seq) for seq in (1, 2)]
    (killed,) = [one for one in outcomes if one.status is Status.FAILED]
    assert killed.error_code is ErrorCode.OOM_KILLED
    assert "the worker's memory_max 96M reached by all tasks together" in killed.reason
    assert "1 process, memory.events" in killed.reason
    assert [one.status for one in outcomes].count(Status.SUCCESS) == 1


def test_all_tasks_together_cannot_pass_the_workers_tasks_max(make: MakeClient) -> None:
    client = make(ceilings=Ceilings(tasks_max=40))
    script = "for i in $(seq 30); do sleep 30 & done; wait; exit 0"
    client.start(1, ["/bin/bash", "-c", script], Limits(tasks_max=35))
    group = task_group(client, 1)
    eventually(lambda: int((group / "pids.current").read_text()) == 31, 120)
    failing = "for i in $(seq 30); do sleep 1 & done 2>/dev/null; exit 3"
    outcome, _ = client.run(2, failing, Limits(tasks_max=35, runtime_max=120))
    assert outcome.error_code is ErrorCode.EXECUTE_FAILED, outcome
    assert "the worker's tasks_max 40 was reached" in outcome.reason
    cancel(client, 1)


def test_all_tasks_together_cannot_pass_the_workers_cpu_quota(make: MakeClient) -> None:
    client = make(ceilings=Ceilings(cpu_quota=0.4))
    for seq in (1, 2):
        client.start(seq, ["/bin/bash", "-c", "while :; do :; done"], Limits(runtime_max=10))
    outcomes = [client.wait_ended(seq) for seq in (1, 2)]
    assert [one.status for one in outcomes] == [Status.TIMEOUT] * 2
    used_s = sum(one.cpu_s or 0 for one in outcomes)
    assert used_s < 0.4 * 10 * 1.5, used_s


def test_a_kill_under_the_workers_quota_is_quick_and_the_quota_is_back_after_it(
    make: MakeClient,
) -> None:
    client = make(ceilings=Ceilings(cpu_quota=0.2))
    limits = Limits(timeout_stop=0.0, runtime_max=600)
    client.start(1, ["/bin/bash", "-c", LOOPS.format(10)], limits)
    task_group(client, 1)
    outcome = cancel(client, 1)
    assert outcome.status is Status.CANCELLED
    assert "could not be killed" not in outcome.reason
    cpu_max = tree_of(client) / "tasks/cpu.max"
    assert cpu_max.read_text() == "20000 100000\n"


# Verdicts.


def test_memory_that_ran_out_above_the_worker_is_not_blamed_on_the_task(
    client: SpawnerClient,
) -> None:
    scope = tree_of(client)
    (scope / "memory.max").write_text(str(96 * MIB))
    outcome, _ = client.run(
        1, f"exec {ALLOCATE.format(150, 60)}", Limits(memory_max=200 * MIB, runtime_max=120)
    )
    assert outcome.error_code is ErrorCode.OOM_KILLED
    assert "the host, or a group above the worker, out of memory" in outcome.reason
    assert "memory_max 200M" not in outcome.reason


def test_a_kill_from_outside_is_called_one(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "300"])
    os.kill(client.wait_started(1), signal.SIGKILL)
    outcome = client.wait_ended(1)
    assert (outcome.error_code, outcome.signal) == (ErrorCode.SIGNALED, "SIGKILL")
    expected = "killed from outside the worker (the host's OOM killer or an operator)"
    assert outcome.reason.startswith(expected)


def test_refused_forks_are_named_when_the_task_fails(client: SpawnerClient) -> None:
    script = "for i in $(seq 40); do sleep 2 & done 2>/dev/null; exit 3"
    outcome, _ = client.run(1, script, Limits(tasks_max=20, runtime_max=120))
    assert outcome.error_code is ErrorCode.EXECUTE_FAILED
    assert "tasks_max 20 was reached" in outcome.reason
    fine, _ = client.run(2, "exit 3", Limits(tasks_max=20))
    assert fine.reason == "exit status 3"


def test_throttling_is_named_when_the_task_ran_out_of_time(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "while :; do :; done", Limits(cpu_quota=0.1, runtime_max=4))
    assert outcome.status is Status.TIMEOUT
    assert "cpu_quota 10% held it back in" in outcome.reason
    assert outcome.cpu_throttled_s is not None
    assert outcome.cpu_throttled_s > 1


# Accounts.


def test_accounts_add_up(client: SpawnerClient) -> None:
    script = """
python3 -c 'x = bytearray(30 << 20)'
dd if=/dev/zero of=f bs=1M count=8 oflag=direct 2>/dev/null
dd if=f of=/dev/null bs=1M iflag=direct 2>/dev/null; rm f
i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done
for i in 1 2 3; do sleep 0.2 & done; wait"""
    outcome, _ = client.run(1, script, Limits(cpu_quota=1.5, runtime_max=300))
    assert outcome.status is Status.SUCCESS
    assert outcome.cpu_user_s
    assert outcome.cpu_system_s is not None
    assert outcome.cpu_s == pytest.approx(outcome.cpu_user_s + outcome.cpu_system_s)
    assert outcome.memory_peak_source == "memory.peak"
    assert outcome.memory_peak_bytes is not None
    assert 30 * MIB <= outcome.memory_peak_bytes <= 200 * MIB
    assert outcome.processes_peak is not None
    assert 4 <= outcome.processes_peak <= 6
    assert outcome.io_read_bytes is not None
    assert outcome.io_read_bytes >= 8 * MIB
    assert outcome.io_write_bytes is not None
    assert outcome.io_write_bytes >= 8 * MIB
    assert outcome.cpu_throttled_s is not None
    for stall_s in (outcome.stall_cpu_s, outcome.stall_memory_s, outcome.stall_io_s):
        assert stall_s is not None
        assert stall_s >= 0
    assert outcome.stall_io_s


# Starts that the kernel refuses.


def ready_groups(client: SpawnerClient) -> list[Path]:
    """The slots that wait, with a launcher each."""

    def look() -> list[Path]:
        slots = list(tree_of(client).glob("tasks/*"))
        slots = [path for path in slots if path.is_dir()]
        waiting = [path for path in slots if (path / "init/cgroup.procs").read_text()]
        return waiting if len(waiting) >= client.settings.pool_min else []

    return eventually(look)


def refuse_with_ebusy(slot: Path) -> None:
    # A group with controllers enabled for children holds no process.
    (slot / "task/cgroup.subtree_control").write_text("+memory")


def refuse_with_eagain(slot: Path) -> None:
    (slot / "task/pids.max").write_text("0")


def refuse_with_enoent(slot: Path) -> None:
    (slot / "task").rmdir()


@pytest.mark.parametrize("spoil", [refuse_with_ebusy, refuse_with_eagain, refuse_with_enoent])
def test_a_start_that_clone3_refuses_is_tried_in_another_slot(
    client: SpawnerClient, spoil: Callable[[Path], None]
) -> None:
    for slot in ready_groups(client):
        spoil(slot)
    for seq in range(1, 4):
        outcome, output = client.run(seq, "echo ran")
        assert (outcome.status, output) == (Status.SUCCESS, b"ran\n"), outcome
    eventually(lambda: len(list(tree_of(client).glob("tasks/*/task"))) <= 2)


def test_a_start_that_stays_refused_is_spawn_failed_and_says_why(client: SpawnerClient) -> None:
    ready_groups(client)
    pids_max = tree_of(client) / "tasks/pids.max"
    # No process more in any slot: neither a launcher nor a task.
    pids_max.write_text("0")
    client.start(1, ["/bin/true"])
    outcome = client.wait_ended(1)
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert "Resource temporarily unavailable" in outcome.reason
    pids_max.write_text("max")
    assert client.run(2, "echo on")[1] == b"on\n"


def test_a_start_that_waits_for_a_process_to_spare_can_be_cancelled(client: SpawnerClient) -> None:
    ready_groups(client)
    pids_max = tree_of(client) / "tasks/pids.max"
    pids_max.write_text("0")
    client.start(1, ["/bin/true"])
    client.cancel(1)
    outcome = client.wait_ended(1)
    assert outcome.error_code in (ErrorCode.CANCELLED, ErrorCode.SPAWN_FAILED)
    pids_max.write_text("max")


# Nothing is left.


@pytest.mark.timeout(3600)
def test_two_thousand_tasks_leave_no_group(client: SpawnerClient) -> None:
    rss_before = 0
    for first in range(1, 2001, 8):
        for seq in range(first, first + 8):
            client.start(seq, ["/bin/true"])
        for seq in range(first, first + 8):
            assert client.wait_ended(seq).status is Status.SUCCESS
            client.acknowledge(seq)
        if first == 497:
            rss_before = proc.memory_bytes([client.welcome.pid])
    tasks = tree_of(client) / "tasks"
    eventually(lambda: len([path for path in tasks.iterdir() if path.is_dir()]) <= 2)
    assert os.listdir(Path(client.settings.state_dir) / "work").__len__() <= 2
    grown = proc.memory_bytes([client.welcome.pid]) - rss_before
    assert grown < 2 * MIB, grown
    stat = dict(line.split() for line in (tree_of(client) / "cgroup.stat").read_text().splitlines())
    assert int(stat["nr_descendants"]) <= 2 + 3 * 2
    assert int(stat["nr_dying_descendants"]) < 1000


# Whom the OOM killer takes.


def test_tasks_do_not_inherit_the_protection_of_the_worker(make: MakeClient) -> None:
    before = proc.oom_score_adj()
    proc.set_oom_score_adj(-500)
    try:
        client = make()
    finally:
        proc.set_oom_score_adj(before)
    client.start(1, ["/bin/sleep", "300"])
    pid = client.wait_started(1)
    assert Path(f"/proc/{client.welcome.pid}/oom_score_adj").read_text() == "-500\n"
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "0\n"
    cancel(client, 1)
    outcome, output = client.run(
        2, "(echo -100 >/proc/self/oom_score_adj) 2>/dev/null; cat /proc/self/oom_score_adj"
    )
    assert (outcome.status, output) == (Status.SUCCESS, b"0\n")


def test_a_spawner_that_dies_in_a_kill_leaves_no_quota_lifted(make: MakeClient) -> None:
    client = make(ceilings=Ceilings(cpu_quota=0.5))
    cpu_max = tree_of(client) / "tasks/cpu.max"
    cpu_max.write_text("max 100000")
    kill_now(client.welcome.pid)
    client.reconnect()
    assert cpu_max.read_text() == "50000 100000\n"
