"""What a host with all of cgroup v2 does better: the kernel holds the limits and tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, eventually, lives

from stockade.platform import cgroup
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Status

pytestmark = pytest.mark.needs_cgroup2_controllers

MIB = 1024 * 1024
# Emulated processors are slow: what takes a moment elsewhere takes seconds here.
ALLOCATE = "python3 -c 'x = bytearray({0} << 20); import time; time.sleep({1})'"


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient()
    yield client
    client.close()


def tree_of(client: SpawnerClient) -> Path:
    """The worker's own group."""
    mount, group = cgroup.find_mount(), cgroup.group_of(client.welcome.pid)
    assert mount is not None
    assert group is not None
    assert group.endswith(f"/stockade-{client.settings.worker_id}.scope/spawner")
    return mount.joinpath(group.lstrip("/")).parent


def test_every_controller_is_used(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "true")
    assert outcome.degraded == ()
    assert outcome.memory_peak_bytes is not None
    assert outcome.processes_peak is not None or not Path("/sys/fs/cgroup/pids.peak").exists()


def test_kernel_kills_at_memory_max_and_is_the_evidence(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, ALLOCATE.format(200, 30), Limits(memory_max=64 * MIB))
    assert outcome.error_code is ErrorCode.OOM_KILLED
    assert outcome.reason.startswith("killed: memory_max 64M reached (peak 6")
    assert "memory.events" in outcome.reason
    assert outcome.signal == "SIGKILL"


def test_processes_count_together_against_memory_max(client: SpawnerClient) -> None:
    script = f"for i in 1 2 3 4; do {ALLOCATE.format(24, 30)} & done; wait"
    outcome, _ = client.run(1, script, Limits(memory_max=64 * MIB, runtime_max=60))
    assert outcome.error_code is ErrorCode.OOM_KILLED


def test_file_pages_are_given_back_and_do_not_kill_the_task(client: SpawnerClient) -> None:
    # On a disk: /tmp may be a tmpfs, whose pages are memory and nothing else.
    script = """f=$(mktemp -p /var/tmp)
dd if=/dev/zero of=$f bs=1M count=100 2>/dev/null; echo rc=$?; rm $f"""
    outcome, output = client.run(1, script, Limits(memory_max=64 * MIB))
    assert (outcome.status, output) == (Status.SUCCESS, b"rc=0\n")


def test_oom_policy_continue_lets_the_rest_of_the_task_live(client: SpawnerClient) -> None:
    script = f"{ALLOCATE.format(200, 30)}; echo still here"
    limits = Limits(memory_max=64 * MIB, oom_policy="continue")
    outcome, output = client.run(1, script, limits)
    assert outcome.status is Status.SUCCESS
    assert b"still here" in output


def test_task_just_below_its_limit_lives(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, f"exec {ALLOCATE.format(36, 1)}", Limits(memory_max=50 * MIB))
    assert outcome.status is Status.SUCCESS
    assert outcome.memory_peak_bytes is not None
    assert outcome.memory_peak_bytes < 50 * MIB


def test_our_own_memory_is_not_in_the_tasks_account(client: SpawnerClient) -> None:
    client.start(1, ["/bin/true"])
    outcome = client.wait_ended(1)
    if outcome.memory_peak_bytes is None:
        pytest.skip("this kernel has no memory.peak")
    assert outcome.memory_peak_bytes < MIB


def test_tasks_max_holds_a_fork_bomb(client: SpawnerClient) -> None:
    limits = Limits(tasks_max=24, runtime_max=10)
    client.start(1, ["/bin/bash", "-c", ":(){ :|:& };:; sleep 2; exit 9"], limits)
    outcome = client.wait_ended(1)
    assert outcome.status in (Status.FAILED, Status.TIMEOUT)
    if outcome.error_code is ErrorCode.EXECUTE_FAILED:
        assert "tasks_max 24 was reached" in outcome.reason
    if outcome.processes_peak is not None:
        assert outcome.processes_peak <= 24
    assert client.run(2, "echo on")[1] == b"on\n"


def test_threads_count_against_tasks_max(client: SpawnerClient) -> None:
    script = """python3 -c '
import threading, time
for _ in range(60): threading.Thread(target=time.sleep, args=(3,), daemon=True).start()' 2>&1"""
    _, output = client.run(1, script, Limits(tasks_max=24, runtime_max=60))
    assert b"can't start new thread" in output


def test_cpu_quota_is_held(client: SpawnerClient) -> None:
    script = "for i in 1 2 3 4; do (while :; do :; done) & done; wait"
    outcome, _ = client.run(1, script, Limits(cpu_quota=0.5, runtime_max=5))
    assert outcome.status is Status.TIMEOUT
    assert outcome.cpu_s is not None
    assert outcome.wall_s is not None
    assert outcome.cpu_s <= 0.5 * outcome.wall_s + 0.5


def test_many_loops_under_a_tiny_quota_die_at_once(client: SpawnerClient) -> None:
    script = "trap '' TERM; for i in $(seq 40); do (while :; do :; done) & done; wait"
    limits = Limits(cpu_quota=0.1, runtime_max=8, timeout_stop=0.5)
    client.start(1, ["/bin/bash", "-c", script], limits)
    client.wait_started(1)
    outcome = client.wait_ended(1)
    assert outcome.status is Status.TIMEOUT
    assert outcome.wall_s is not None
    # Deadline, grace, and the kill: under its own quota the kill alone would take many seconds.
    assert outcome.wall_s < 8 + 0.5 + 5


def test_endless_loop_ends_at_its_deadline(client: SpawnerClient) -> None:
    outcome, _ = client.run(1, "while :; do :; done", Limits(runtime_max=2))
    assert outcome.status is Status.TIMEOUT


def test_task_cannot_write_its_own_limits(client: SpawnerClient) -> None:
    script = """
group=/sys/fs/cgroup$(sed 's/^0:://' /proc/self/cgroup)
for file in $group/memory.max $group/cgroup.procs $group/../cgroup.procs; do
  (echo max > $file) 2>/dev/null && echo wrote $file
done; mkdir $group/more 2>/dev/null && echo made; echo end"""
    assert client.run(1, script)[1] == b"end\n"


def test_groups_do_not_pile_up(client: SpawnerClient) -> None:
    for seq in range(1, 31):
        client.run(seq, "sleep 45678 &")
    tasks = tree_of(client) / "tasks"
    # What stays are the slots that wait ready.
    eventually(lambda: sum(path.is_dir() for path in tasks.iterdir()) <= client.settings.pool_max)
    assert not lives("45678")
