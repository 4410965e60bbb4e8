"""Hostile and broken tasks (attacks.toml) against a real worker, one test each.

Every attack is dispatched over HTTP with the limits of the file's head. After each the outcome is
right, it came back in time, a harmless task succeeds, and nothing of it is left.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import RecordingScheduler
from worker_process import WorkerProcess, eventually

from stockade.platform import cgroup, proc
from stockade.sandbox.capabilities import probe
from stockade.sandbox.profiles import PROFILES

ATTACKS = tomllib.loads((Path(__file__).parent / "attacks.toml").read_text())["attack"]
LIMITS = {
    "memory_max": "64M",
    "memory_swap_max": "0",
    "tasks_max": 24,
    "cpu_quota": "80%",
    "output_max": "256K",
    "workdir_max": "16M",
    "workdir_inodes_max": 2000,
    "limit_fsize": "12M",
    "timeout_stop": "1s",
}
TIMEOUT_S = 4
# A machine may be slow, and what is not to be ended by its timeout has time.
PATIENCE = 15
ENDED_BY_TIMEOUT = {
    "cpu-endless-loop", "cpu-eight-loops", "output-flood", "pids-comet", "pids-fork-bomb",
    "signal-ignores-term", "signal-stops-itself",
}  # fmt: skip
IS_ROOT = os.geteuid() == 0

Report = dict[str, Any]


def lines(report: Report) -> list[str]:
    return str(report["output"]).splitlines()


def succeeded(report: Report) -> bool:
    return bool(report["status"] == "success")


def ended(report: Report, status: str, code: str = "") -> bool:
    return (report["status"], report["error_code"]) == (status, code)


def timed_out(report: Report) -> bool:
    return ended(report, "timeout", "timeout") and report["wall_s"] < report["timeout_s"] + 6


def signaled(number_name: str) -> Callable[[Report], bool]:
    return lambda report: ended(report, "failed", "signaled") and report["signal"] == number_name


def zero_capabilities(report: Report) -> bool:
    found = dict(line.split(":\t") for line in lines(report)[1:])
    sets = [value for name, value in found.items() if name.startswith("Cap")]
    uid_is_ours = lines(report)[0] != "0" or not IS_ROOT
    return all(int(value, 16) == 0 for value in sets) and found["NoNewPrivs"] == "1" and uid_is_ours


def leaks_no_environment(report: Report) -> bool:
    names = {line.partition("=")[0] for line in lines(report) if "=" in line}
    allowed = {
        "HOME", "IDEMPOTENCY_KEY", "LANG", "LOGNAME", "PATH", "PWD", "SANDBOX",
        "SCHEDULE_INSTANCE_ID", "SHARD_NO", "SHARD_TOTAL", "SHELL", "SHLVL", "TMPDIR", "USER", "_",
    }  # fmt: skip
    return succeeded(report) and names <= allowed


def only_private_places_are_writable(report: Report) -> bool:
    """Of the world-writable directories found none but the task's own takes a file."""
    private = {"/tmp", "/var/tmp", "/dev/shm"}
    found = {line for line in lines(report) if line.startswith("/")}
    written = {line.removeprefix("WW:") for line in lines(report) if line.startswith("WW:")}
    return written <= private and "/dev/mqueue" not in found and "/tmp" in found


ORACLES: dict[str, Callable[[Report], bool]] = {
    "cpu-endless-loop": timed_out,
    "cpu-eight-loops": lambda r: timed_out(r) and r["cpu_s"] <= 0.8 * r["wall_s"] + 0.3,
    "cpu-raise-priority": lambda r: succeeded(r) and lines(r)[-1] != "rc=0",
    "memory-allocate": lambda r: ended(r, "failed", "oom_killed") and "memory_max" in r["reason"],
    "memory-four-processes": lambda r: ended(r, "failed", "oom_killed"),
    "memory-self-sigkill": signaled("SIGKILL"),
    "memory-exit-137": lambda r: ended(r, "failed", "execute_failed") and r["exit_code"] == 137,
    "memory-reserve-1tib": lambda r: succeeded(r) and "reserved" in r["output"],
    "memory-oom-score": lambda r: lines(r)[-1] != "rc=0",
    "pids-fork-bomb": lambda r: r["status"] in ("success", "failed", "timeout"),
    "pids-comet": lambda r: r["status"] in ("success", "timeout"),
    "pids-threads": lambda r: "can't start new thread" in r["output"],
    "fs-fill-workdir": lambda r: int(lines(r)[-1].removeprefix("n=")) < 20,
    "fs-sparse-1t": lambda r: r["status"] in ("success", "failed"),
    "output-flood": lambda r: timed_out(r) and r["output_truncated"],
    "output-one-long-line": lambda r: (
        succeeded(r) and r["output_bytes"] == 300_004 and r["output_truncated"]
    ),
    # The daemon would sleep for 30 s.
    "output-held-by-daemon": lambda r: succeeded(r) and r["output"] == "hi\n" and r["wall_s"] < 15,
    "output-not-text": lambda r: succeeded(r) and r["output_bytes"] == 11,
    "output-closed-early": lambda r: r["exit_code"] == 7 and r["wall_s"] >= 0.9,
    "signal-ignores-term": timed_out,
    "signal-stops-itself": timed_out,
    "signal-kill-all": lambda r: r["status"] in ("failed", "success"),
    "signal-term-self": lambda r: signaled("SIGTERM")(r) and "survived" not in r["output"],
    "signal-double-fork": succeeded,
    "signal-segv": signaled("SIGSEGV"),
    "leak-environment": leaks_no_environment,
    "leak-descriptors": lambda r: set(lines(r)[-1].split()) <= {"0", "1", "2", "3"},
    "leak-tty": lambda r: lines(r)[-1] != "rc=0",
    "privilege-status": lambda r: (
        zero_capabilities(r) and (r["profile"] != "sealed" or "Seccomp:\t2" in r["output"])
    ),
    "privilege-setuid": lambda r: "0" not in lines(r) and "uid=0" not in r["output"],
    "privilege-ptrace": lambda r: lines(r)[-1] == "pt -1 -1",
    "net-own-loopback": lambda r: "LO-OK" in r["output"],
    "net-raw": lambda r: (
        not re.search(r"RAW" if r["profile"] == "sealed" else r"RAW (2|17)\b", r["output"])
    ),
    "cgroup-own-limits": lambda r: lines(r)[-1] == "end" and not re.search(r"W:|MK", r["output"]),
    "proc-sys-writes": lambda r: lines(r)[-1] == "end" and "W:" not in r["output"],
    "cleanup-deep-tree": succeeded,
    "cleanup-mode-000": succeeded,
    "cleanup-names": succeeded,
    "network-drive-own-worker": lambda r: succeeded(r) and "end" in r["output"],
    "memory-dev-shm": lambda r: (
        succeeded(r) and lines(r)[-1] == "rc=1" and "No space left" in r["output"]
    ),
    "fs-inodes": lambda r: succeeded(r) and int(lines(r)[-1].removeprefix("n=")) < 5000,
    "fs-write-system": lambda r: lines(r) == ["end"],
    "fs-world-writable": only_private_places_are_writable,
    "fs-leftover-a": lambda r: succeeded(r) and "leftover" in r["output"],
    "fs-leftover-b": lambda r: succeeded(r) and "leftover" not in r["output"],
    "leak-processes": lambda r: int(lines(r)[0]) <= 4 and re.search("denied|No such", r["output"]),
    "privilege-userns": lambda r: lines(r)[-1] != "rc=0" and "0" not in lines(r),
    "privilege-raw-syscalls": lambda r: (
        len(lines(r)) == 9 and all(line.split()[1] in ("EPERM", "ENOSYS") for line in lines(r))
    ),
    # An error number for each: a connect that ran into its timeout has none.
    "net-reach-out": lambda r: (
        succeeded(r) and len(lines(r)) == 3 and all(line.isdigit() for line in lines(r))
    ),
    "privilege-foreign-abi": lambda r: "BYPASS" not in r["output"] and "rm" not in r["output"],
    "network-unix-sockets": lambda r: succeeded(r) and "CONNECTED" not in r["output"],
}

# Attacks on other processes of the same uid.
SAME_UID = ("privilege-ptrace", "signal-kill-all")


def marks(attack: dict[str, Any], profile: str) -> list[pytest.MarkDecorator]:
    found = []
    needs = attack.get("needs")
    if needs == "root":
        found.append(pytest.mark.skipif(not IS_ROOT, reason="needs root"))
    elif needs == "cpu" or (needs == "pids" and not IS_ROOT):
        found.append(pytest.mark.needs_cgroup2_controllers)
    if not IS_ROOT and profile == "process" and attack["id"] in SAME_UID:
        reason = "without root tasks share the worker's uid and can reach its processes"
        found.append(pytest.mark.skip(reason=reason))
    if not IS_ROOT and attack["id"] == "fs-inodes":
        found.append(pytest.mark.skip(reason="needs root: without it there are no quotas"))
    return found


def pairs() -> list[Any]:
    """Every attack with every profile that must hold it."""
    return [
        pytest.param(attack, profile, id=f"{attack['id']}-{profile}", marks=marks(attack, profile))
        for attack in ATTACKS
        for profile in PROFILES
        if attack["profile"] == "all"
        or PROFILES.index(profile) >= PROFILES.index(attack["profile"])
    ]


class Attacked:
    """A worker under attack and the scheduler that it reports to."""

    def __init__(self, worker: WorkerProcess, scheduler: RecordingScheduler) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.url = worker.url
        self._count = 0

    def run(
        self, script: str, profile: str = "process", timeout_s: float = PATIENCE * TIMEOUT_S
    ) -> Report:
        """Dispatches one script; its terminal report with the output apart."""
        self._count += 1
        key = f"attack-{self._count}"
        status, answer = self.scheduler.dispatch(
            self.url, schedule_instance_id=key, task_type="shell", payload=script,
            timeout_seconds=timeout_s, profile=profile, limits=LIMITS,
        )  # fmt: skip
        assert status == 202, answer
        report = dict(self.scheduler.terminal_report(key, timeout_s + 60))
        message = report["error_message"]
        reason = report["reason"] or ""
        report["output"] = message if report["status"] == "success" else message[len(reason) + 1 :]
        report["timeout_s"] = timeout_s
        return report

    def descriptors(self) -> int:
        assert self.worker.process is not None
        return len(os.listdir(f"/proc/{self.worker.process.pid}/fd"))

    def check_nothing_left(self) -> None:
        """No process of a slot's uid, no work directory, no cgroup of a slot."""
        place = self.worker.place
        eventually(lambda: os.listdir(place / "state/work") == [])
        if IS_ROOT:
            # The first uid is the launchers'.
            uids = range(self.worker.uid_min + 1, self.worker.uid_min + 200)
            eventually(lambda: not any(proc.processes_of_uid(uid) for uid in uids))
        mount = cgroup.find_mount()
        if mount is not None:
            eventually(lambda: not self.slot_groups(mount))

    def slot_groups(self, mount: Path) -> list[str]:
        """Those of this worker; walked so that others may come and go meanwhile."""
        return [
            path
            for path, _, _ in os.walk(mount)
            if self.worker.id in path and os.path.basename(os.path.dirname(path)) == "tasks"
        ]


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    with RecordingScheduler() as scheduler:
        worker = WorkerProcess(
            scheduler.url, worker="pool_max = 0", extra="[report]\nexcerpt = '60K'"
        )
        # A listener that a careless parent would hand down; see leak-descriptors.
        with socket.create_server(("127.0.0.1", 0)) as inheritable:
            inheritable.set_inheritable(True)
            worker.start()
            yield Attacked(worker, scheduler)
        worker.close()


@pytest.mark.parametrize(("attack", "profile"), pairs())
def test_attack_is_contained(attacked: Attacked, attack: dict[str, Any], profile: str) -> None:
    before = attacked.descriptors()
    script = attack["script"].strip()
    if attack["id"] == "network-drive-own-worker":
        script = f"export WORKER_PORT={attacked.url.rpartition(':')[2]}\n{script}"
    timeout_s = attack.get("timeout_s", TIMEOUT_S)
    if attack["id"] not in ENDED_BY_TIMEOUT:
        timeout_s *= PATIENCE
    report = attacked.run(script, profile, timeout_s)
    assert report["profile"] == profile
    assert ORACLES.get(attack["id"], succeeded)(report), json.dumps(report)
    harmless = attacked.run("echo harmless", profile)
    assert (harmless["status"], harmless["output"]) == ("success", "harmless\n"), harmless
    attacked.check_nothing_left()
    eventually(lambda: attacked.descriptors() <= before + 1)


def test_every_attack_of_the_file_has_its_oracle() -> None:
    assert {attack["id"] for attack in ATTACKS} == set(ORACLES)


def test_task_cannot_cancel_another_through_the_workers_port(attacked: Attacked) -> None:
    if not IS_ROOT:
        pytest.skip("needs root: tasks with uids of their own")
    attacked.scheduler.dispatch(
        attacked.url, schedule_instance_id="victim", task_type="shell", payload="sleep 3"
    )
    attack = next(a for a in ATTACKS if a["id"] == "network-drive-own-worker")
    port = attacked.url.rpartition(":")[2]
    attacked.run(f"export WORKER_PORT={port}\n{attack['script']}")
    assert attacked.scheduler.terminal_report("victim", 60)["status"] == "success"


def test_task_cannot_trace_its_launcher(attacked: Attacked) -> None:
    if not IS_ROOT:
        pytest.skip("needs root: the launcher has another uid")
    script = """exec python3 -c "
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.readlink('/proc/self/exe') != '', libc.ptrace(16, os.getppid(), 0, 0), ctypes.get_errno())
" """
    assert attacked.run(script)["output"].split() == ["True", "-1", "1"]


def test_host_facts_are_told_in_each_report(attacked: Attacked) -> None:
    report = attacked.run("true")
    lacks = {"memory": "memory_max", "pids": "tasks_max", "cpu": "cpu_quota"}
    for controller, feature in lacks.items():
        assert (feature in report["degraded"]) == (controller not in probe().controllers)
