"""Where the worker's tree stands: a scope of systemd's, or a group made by hand, or nowhere."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spawner_client import SpawnerClient, children, eventually, kill_now

from stockade.platform import cgroup, proc
from stockade.sandbox import delegation
from stockade.sandbox.outcome import ErrorCode
from stockade.sandbox.spawner_start import start_spawner
from stockade.sandbox.systemd import Manager
from stockade.sandbox.tree import group_name

pytestmark = [pytest.mark.needs_cgroup2_controllers, pytest.mark.needs_systemd]

STOCKADE = [sys.executable, "-m", "stockade.supervisor.cli.main"]
SYSTEM = Manager(None)


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient()
    yield client
    client.close()


def unit_of(client: SpawnerClient) -> str:
    return group_name(client.settings.worker_id)


def group_path(pid: int) -> Path:
    mount, group = cgroup.find_mount(), cgroup.group_of(pid)
    assert mount is not None
    assert group is not None
    return mount / group.lstrip("/")


def properties(unit: str, *names: str) -> dict[str, str]:
    text = subprocess.run(
        ["systemctl", "show", "-p", ",".join(names), unit],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return dict(line.split("=", 1) for line in text.splitlines())


def standby_of(spawner: int) -> int:
    return eventually(lambda: children(spawner, "standby"))[0]


def kill_spawners(client: SpawnerClient) -> None:
    """SIGKILL to the spawner and its standby, with no time for a new standby in between."""
    spawner = client.welcome.pid
    standby = standby_of(spawner)
    os.kill(spawner, signal.SIGSTOP)
    os.kill(standby, signal.SIGKILL)
    kill_now(spawner)
    client.socket.close()


def test_spawner_and_standby_are_in_a_delegated_scope_of_their_own(client: SpawnerClient) -> None:
    unit = unit_of(client)
    for pid in (client.welcome.pid, standby_of(client.welcome.pid)):
        assert cgroup.group_of(pid) == f"/system.slice/{unit}/spawner"
    found = properties(unit, "Delegate", "TasksMax", "ActiveState", "OOMPolicy")
    assert (found["Delegate"], found["ActiveState"]) == ("yes", "active")
    assert found["TasksMax"] == "infinity"
    tasks = group_path(client.welcome.pid).parent / "tasks"
    enabled = (tasks / "cgroup.subtree_control").read_text().split()
    assert set(enabled) >= {"cpu", "io", "memory", "pids"}
    assert client.welcome.degraded == ()


def test_scope_ends_with_its_spawner() -> None:
    client = SpawnerClient()
    unit, group = unit_of(client), group_path(client.welcome.pid).parent
    client.run(1, "true")
    client.close()
    eventually(lambda: properties(unit, "LoadState")["LoadState"] == "not-found")
    eventually(lambda: not group.exists())


def test_later_spawner_joins_the_scope_that_a_task_keeps_alive(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "300"])
    task = client.wait_started(1)
    before = group_path(client.welcome.pid)
    kill_spawners(client)
    assert cgroup.group_of(task) is not None
    assert properties(unit_of(client), "ActiveState")["ActiveState"] == "active"
    client.connect()
    assert group_path(client.welcome.pid) == before
    # Nobody was in charge for an unknown time: what lived is killed, and told as lost.
    client.send_list()
    assert client.wait_ended(1).error_code is ErrorCode.WORKER_LOST
    assert not Path(f"/proc/{task}").exists()
    assert client.run(2, "true")[0].degraded == ()


def test_many_deaths_of_all_spawners_leave_one_that_starts(client: SpawnerClient) -> None:
    for seq in range(1, 6):
        if seq % 2:
            client.start(seq, ["/bin/sleep", "300"])
            client.wait_started(seq)
        kill_spawners(client)
        client.connect()
        client.send_list()
        if seq % 2:
            client.wait_ended(seq)
    assert client.run(9, "true")[0].degraded == ()


def test_a_scope_that_is_dying_is_waited_for() -> None:
    client = SpawnerClient()
    settings, unit = client.settings, unit_of(client)
    client.send_finish()
    eventually(lambda: properties(unit, "LoadState")["LoadState"] == "not-found")
    blocker = subprocess.Popen(
        [*SYSTEM.scope_command(unit, None), "sh", "-c", "trap '' TERM; echo on; sleep 4; :"],
        stdout=subprocess.PIPE,
    )
    assert blocker.stdout is not None
    assert blocker.stdout.readline() == b"on\n"
    subprocess.run(["systemctl", "stop", "--no-block", unit], check=True)
    eventually(lambda: properties(unit, "ActiveState")["ActiveState"] == "deactivating")
    started = start_spawner(settings)
    assert not started.found
    assert blocker.poll() is not None or blocker.wait(10) is not None
    blocker.stdout.close()
    client.connect_to(started.socket_path)
    assert cgroup.group_of(client.welcome.pid) == f"/system.slice/{unit}/spawner"
    assert client.run(1, "true")[0].degraded == ()
    client.close()


def test_stale_groups_of_an_earlier_life_are_cleared(client: SpawnerClient) -> None:
    client.start(1, ["/bin/sleep", "300"])
    client.wait_started(1)
    tasks = group_path(client.welcome.pid).parent / "tasks"
    stale = [tasks / "7-1", tasks / "7-1/task", tasks / "7-1/init", tasks / "7-2", tasks / "odd"]
    for path in stale:
        path.mkdir()
    forgotten = subprocess.Popen(["sleep", "4567"])
    (tasks / "odd/cgroup.procs").write_text(str(forgotten.pid))
    kill_spawners(client)
    client.connect()
    client.send_list()
    client.wait_ended(1)
    forgotten.wait(30)
    eventually(lambda: not any(path.exists() for path in stale))
    assert client.run(2, "true")[0].degraded == ()


# An ordinary user.


@dataclasses.dataclass
class User:
    name: str
    uid: int

    def command(self, *argv: str) -> list[str]:
        return [
            "setpriv", f"--reuid={self.name}", f"--regid={self.name}", "--init-groups",
            "env", "-i", f"HOME=/home/{self.name}", f"PATH={os.environ['PATH']}",
            f"XDG_RUNTIME_DIR=/run/user/{self.uid}", f"PYTHONPATH={Path(__file__).parent}", *argv,
        ]  # fmt: skip

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*argv), capture_output=True, text=True, check=False, cwd="/", timeout=300
        )

    def stockade(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.run(*STOCKADE, *argv)


def make_user() -> User:
    name = f"lab{secrets.token_hex(3)}"
    subprocess.run(["useradd", "-m", "-s", "/bin/sh", name], check=True)
    uid = int(subprocess.run(["id", "-u", name], capture_output=True, check=True).stdout)
    return User(name, uid)


@pytest.fixture
def user() -> Iterator[User]:
    user = make_user()
    subprocess.run(["loginctl", "enable-linger", user.name], check=True)
    # Which linger starts too, but not while that of the last user with this uid is still stopping.
    subprocess.run(["systemctl", "start", f"user@{user.uid}.service"], check=True)
    eventually(lambda: Path(f"/run/user/{user.uid}/systemd/private").exists())
    yield user
    subprocess.run(["loginctl", "disable-linger", user.name], check=True)
    subprocess.run(["loginctl", "terminate-user", user.name], check=False)
    # By those who let it go; logind may not know of it any more.
    units = [f"user@{user.uid}.service", f"user-runtime-dir@{user.uid}.service"]
    subprocess.run(["systemctl", "stop", *units], check=True)
    eventually(lambda: not proc.processes_of_uid(user.uid))
    eventually(lambda: not Path(f"/run/user/{user.uid}").exists())
    subprocess.run(["userdel", "-r", user.name], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def plain_user() -> Iterator[User]:
    user = make_user()
    yield user
    subprocess.run(["userdel", "-r", user.name], check=False, stderr=subprocess.DEVNULL)


def outcome_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stderr, done
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    return found


@pytest.mark.needs_lab
def test_an_ordinary_user_has_limits_by_his_own_systemd(user: User) -> None:
    allocate = "x = bytearray(200 << 20); import time; time.sleep(30)"
    done = user.stockade("run", "--json", "--memory-max", "64M", "--", "python3", "-c", allocate)
    outcome = outcome_of(done)
    assert outcome["error_code"] == "oom_killed", outcome
    assert "memory.events" in outcome["reason"]
    assert done.returncode == 137
    # Only what takes root is missing.
    assert outcome["degraded"] == ["own_uid", "cgroup_namespace"]


@pytest.mark.needs_lab
def test_a_controller_that_the_user_lacks_is_named_with_what_mends_it(user: User) -> None:
    report = json.loads(user.stockade("doctor", "--json").stdout)
    (missing,) = [
        entry
        for entry in report["profiles"]["process"]["missing"]
        if entry["feature"] == "io_weight"
    ]
    assert "io" in missing["why"]
    assert "Delegate=cpu io memory pids" in missing["mend"]
    assert "user@.service" in missing["mend"]
    assert report["host"]["controllers"] == ["cpu", "memory", "pids"]


@pytest.mark.needs_lab
def test_a_users_later_spawner_joins_from_outside_his_own_systemd(user: User) -> None:
    script = """
import spawner_client, test_lab_scope as lab, os
client = spawner_client.SpawnerClient()
client.start(1, ["/bin/sleep", "300"])
client.wait_started(1)
before = lab.group_path(client.welcome.pid)
lab.kill_spawners(client)
client.connect(); client.send_list(); client.wait_ended(1)
assert lab.group_path(client.welcome.pid) == before, (lab.group_path(client.welcome.pid), before)
assert f"user@{os.getuid()}.service" in str(before)
print(client.run(2, "true")[0].status)
client.close()
"""
    done = user.run(sys.executable, "-c", script)
    assert done.stdout == "success\n", done.stderr


@pytest.mark.needs_lab
def test_a_user_without_a_systemd_of_his_own_is_told_of_linger(plain_user: User) -> None:
    done = plain_user.stockade(
        "run", "--profile", "process", "--on-unsupported", "refuse", "--", "true"
    )
    assert done.returncode == 125
    assert f"loginctl enable-linger {plain_user.uid}" in done.stderr
    degraded = outcome_of(
        plain_user.stockade("run", "--profile", "process", "--json", "--", "true")
    )["degraded"]
    assert {"memory_max", "tasks_max", "cgroup_kill"} <= set(degraded)


# Without systemd: what a container sees, made with its own tools.

# A runtime gives a container a group of its own, and stays out of it.
RUNTIME = """
own=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)
mkdir $own/runtime $own/container
echo 0 >$own/runtime/cgroup.procs
echo +cpu +io +memory +pids >$own/cgroup.subtree_control
export own
unshare --mount --pid --fork sh -c 'echo 0 >$own/container/cgroup.procs; exec {unshare} "$0"'
"""
CONTAINER = """
mount -t tmpfs none /run
{mounts}
mount -t proc proc /proc
{command}
"""
PRIVATE = "umount -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup"
STOCKADE_COMMAND = " ".join(STOCKADE)


def in_container(command: str, *, namespaces: str, mounts: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell command as a container's; ``namespaces`` is for unshare, after the pid's."""
    inner = CONTAINER.format(mounts=mounts, command=command)
    runtime = RUNTIME.format(unshare=f"unshare {namespaces} sh -c" if namespaces else "sh -c")
    runtime = runtime.replace('"$0"', '"$container"')
    return subprocess.run(
        ["systemd-run", "--scope", "--quiet", "--collect", "-p", "Delegate=yes", "--",
         "env", f"container={inner}", "sh", "-c", runtime],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


LIMITS = "--memory-max 64M --tasks-max 50 --cpu-quota 50%"
RUN = f"{STOCKADE_COMMAND} run --profile process --json {LIMITS} -- cat /proc/self/cgroup"


@pytest.mark.needs_lab
@pytest.mark.parametrize(
    ("namespaces", "mounts"), [("--cgroup", PRIVATE), ("", ":")], ids=["private", "host"]
)
def test_in_a_container_the_tree_is_made_by_hand(namespaces: str, mounts: str) -> None:
    done = in_container(RUN, namespaces=namespaces, mounts=mounts)
    outcome = outcome_of(done)
    assert outcome["status"] == "success", done
    assert outcome["degraded"] == []
    assert outcome["memory_peak_source"] == "memory.peak"
    # Below the container's own group, so that its limits go on to hold.
    where = done.stdout.strip().removeprefix("0::")
    if namespaces:
        assert where.startswith("/stockade-run-"), where
    else:
        assert "/container/stockade-run-" in where, where


@pytest.mark.needs_lab
def test_in_a_container_with_read_only_cgroups_it_says_so_and_what_mends_it() -> None:
    mounts = f"{PRIVATE}; mount -o remount,bind,ro /sys/fs/cgroup"
    run = f"{STOCKADE_COMMAND} run --profile process"
    done = in_container(
        f"{run} --on-unsupported refuse -- true", namespaces="--cgroup", mounts=mounts
    )
    assert done.returncode == 125
    assert "Read-only file system" in done.stderr
    assert "a writable /sys/fs/cgroup" in done.stderr
    allocate = "x = bytearray(200 << 20); import time; time.sleep(30)"
    done = in_container(
        f"{run} --json --memory-max 64M -- python3 -c '{allocate}'",
        namespaces="--cgroup", mounts=mounts,
    )  # fmt: skip
    outcome = outcome_of(done)
    assert outcome["error_code"] == ErrorCode.OOM_KILLED
    assert "watchdog" in outcome["reason"]


@pytest.mark.needs_lab
def test_processes_that_were_there_are_moved_aside_so_that_controllers_can_be_enabled() -> None:
    command = (
        f"{STOCKADE_COMMAND} run --profile process -- true; "
        "cat /proc/1/cgroup /sys/fs/cgroup/cgroup.subtree_control"
    )
    done = in_container(command, namespaces="--cgroup", mounts=PRIVATE)
    lines = done.stdout.splitlines()
    assert lines[0] == f"0::/{delegation.ASIDE}", done
    assert set(lines[1].split()) >= {"cpu", "io", "memory", "pids"}


@pytest.mark.needs_lab
def test_a_second_worker_in_a_container_finds_its_place_beside_what_was_moved_aside() -> None:
    command = f"{RUN}; {RUN}"
    done = in_container(command, namespaces="--cgroup", mounts=PRIVATE)
    assert len(done.stdout.splitlines()) == 2, done
    for line in done.stdout.splitlines():
        assert line.startswith("0::/stockade-run-")
    assert outcome_of(done)["degraded"] == []
