"""``stockade doctor --prove``: what it says here, and that each of its tasks can be seen to win.

Every hostile task is also run with nothing that contains it, and must be told as not contained
then: a task that could not win would prove nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE_S, STOCKADE, eventually

from stockade.platform import cgroup
from stockade.sandbox.capabilities import HostCapabilities, probe
from stockade.sandbox.delegation import CONTROLLERS
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import Feature, Profile
from stockade.supervisor.cli.hostile import NEIGHBOUR, Hostile
from stockade.supervisor.cli.hostile_tasks import hostile_tasks
from stockade.supervisor.cli.proof import Observed, Verdict, judge, printable
from stockade.supervisor.cli.prove import Output, prove, what_lives

TASKS = hostile_tasks(os.uname().machine)
BY_NAME = {task.name: task for task in TASKS}
RICH = HostCapabilities(
    root=True,
    kernel="6.12",
    cgroup_parent="/sys/fs/cgroup",
    cgroup_scope=False,
    cgroup_reason="",
    cgroup_mend="",
    lacks={},
    disk="8:0",
    controllers=frozenset(("cpu", "io", "memory", "pids")),
    cgroup_kill=True,
    obstacles={},
)
PROFILES = list(Profile)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: without it less is held")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOCKADE, "doctor", "--prove", *arguments],
        capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False,
    )  # fmt: skip


def traces() -> set[str]:
    """What a proof could leave on this host."""
    found = {f"/tmp/{name}" for name in os.listdir("/tmp") if name.startswith("stockade-run-")}
    found |= {name for name in os.listdir("/dev/shm") if "stockade-prove" in name}
    mount = cgroup.find_mount()
    if mount is not None:
        found |= {str(path) for path in mount.glob("stockade-run-*")}
    # Of the range that slots take their uids from.
    found |= {
        line
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        if int(line.split()[7]) >= 0x70000000
    }
    return found


# What it says.


def test_every_hostile_task_is_contained_on_this_host_or_said_not_to_be_enforced() -> None:
    ended = doctor()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("contained ") for line in lines) >= 20
    assert not [line for line in lines if line.startswith("NOT ")]
    host = probe()
    enforced = not [line for line in lines if line.startswith("not enforced") and "cpu" in line]
    assert enforced == ("cpu" in host.controllers)


@needs_root
@pytest.mark.parametrize("profile", [Profile.PROCESS, Profile.PRIVATE])
def test_weaker_profile_is_said_not_to_contain_what_it_does_not_hold(profile: Profile) -> None:
    ended = doctor("--profile", profile, "--json")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    proof = found["proof"]
    assert proof["profile"] == profile
    verdicts = {entry["name"]: entry["verdict"] for entry in proof["tasks"]}
    for task in TASKS:
        is_beyond = PROFILES.index(task.weakest) > PROFILES.index(profile)
        assert (verdicts[task.name] == Verdict.NOT_CONTAINED) == is_beyond, task.name
    assert verdicts["neighbour"] == Verdict.CONTAINED
    assert proof[Verdict.NOT_CONTAINED] == list(verdicts.values()).count(Verdict.NOT_CONTAINED)
    assert {"host", "profiles"} <= set(found)


def test_proof_leaves_nothing_behind() -> None:
    before = traces()
    # Where most could be left: this profile sees the host's directories.
    doctor("--profile", "process")
    # Tests beside this one leave theirs in a moment, too.
    eventually(lambda: traces() <= before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_proof_leaves_nothing_behind(number: signal.Signals) -> None:
    before = traces()
    process = subprocess.Popen(
        [*STOCKADE, "doctor", "--prove"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("contained"):
        pass
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert "Traceback" not in errors
    eventually(lambda: traces() <= before)


def test_task_that_reaches_something_is_told_and_the_others_go_on() -> None:
    tasks = [Hostile("a", "win", "echo REACHED it; echo end", "nothing"), BY_NAME["privileges"]]
    proofs = list(prove(tasks, Profile.SEALED, probe()))
    assert [(proof.name, proof.verdict) for proof in proofs] == [
        ("a", Verdict.NOT_CONTAINED),
        ("privileges", Verdict.CONTAINED),
        ("neighbour", Verdict.CONTAINED),
    ]
    assert proofs[0].evidence == "reached it"


def test_harmed_neighbour_is_told() -> None:
    tasks = [Hostile("a", "nothing", "echo end", "nothing")]
    proofs = prove(tasks, Profile.PROCESS, probe())
    assert next(proofs).verdict is Verdict.CONTAINED
    for pid in neighbours():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not neighbours())
    assert next(proofs).verdict is Verdict.NOT_CONTAINED
    assert next(proofs, None) is None
    for name in os.listdir("/dev/shm"):
        if "stockade-prove" in name:
            os.unlink(f"/dev/shm/{name}")


def neighbours() -> list[int]:
    """The tasks of this process' spawner that run beside the hostile ones."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            environment = Path(f"/proc/{int(entry)}/environ").read_bytes()
            if b"MARK=stockade-prove-" in environment and b"HOST_PORT" in environment:
                found.append(int(entry))
    return found


# That each can win.


class Unconfined:
    """The range without its spawner: the same neighbour and listeners, and nothing that holds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._mark = f"stockade-prove-{secrets.token_hex(8)}"
        port = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(directory / "host.sock"))
        listener.listen()
        home = directory / "neighbour"
        home.mkdir()
        neighbour = subprocess.Popen(
            ["bash", "-c", NEIGHBOUR], cwd=home, env=self._environment(self._mark),
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._stack.callback(neighbour.wait)
        self._stack.callback(neighbour.terminate)
        assert neighbour.stdout is not None
        self._stack.callback(neighbour.stdout.close)
        words = neighbour.stdout.readline().split()
        # Something to be found by its name, as the spawner of a worker is.
        shutil.copy("/bin/sleep", directory / "stockade-spawner")
        spawner = subprocess.Popen([directory / "stockade-spawner", "600"])
        self._stack.callback(spawner.wait)
        self._stack.callback(spawner.kill)
        self._more = {
            "HOST_PORT": str(port.getsockname()[1]),
            "HOST_SOCKET": str(directory / "host.sock"),
            "HOST_DIRECTORY": str(directory),
            "NEIGHBOUR_MARK": self._mark,
            "NEIGHBOUR_PID": str(neighbour.pid),
            "NEIGHBOUR_PORT": words[1],
            "NEIGHBOUR_DIRECTORY": words[2],
        }

    def _environment(self, mark: str) -> dict[str, str]:
        return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "MARK": mark}

    def run(self, task: Hostile) -> Observed:
        mark = f"{self._mark}-{task.name}"
        work = self._directory / task.name
        work.mkdir()
        inherited, write_end = os.pipe()
        with Output() as output:
            # A shell between: the task may trace its parent.
            with subprocess.Popen(
                ["bash", "-c", 'bash -c "$0"; exit $?', task.script],
                cwd=work, env={**self._environment(mark), **self._more}, pass_fds=(inherited,),
                stdout=output.write_end, stderr=output.write_end, start_new_session=True,
            ) as ended:  # fmt: skip
                ended.wait(DEADLINE_S)
            output.close_for_task()
            left = what_lives(mark, output)
        os.close(inherited)
        os.close(write_end)
        if task.name == "untidy":
            left += [f"its work directory {name}" for name in os.listdir(work)]
        code = ErrorCode.NONE if ended.returncode == 0 else ErrorCode.EXECUTE_FAILED
        status = Status.SUCCESS if ended.returncode == 0 else Status.FAILED
        outcome = Outcome(status, code, exit_code=ended.returncode)
        return Observed(outcome, output.text, tuple(left))

    def close(self) -> None:
        self._stack.close()
        subprocess.run(["rm", "-rf", self._directory], check=True)


@pytest.fixture
def unconfined() -> Iterator[Unconfined]:
    place = Unconfined(Path(tempfile.mkdtemp(prefix="stockade-test-")))
    yield place
    place.close()


# Busy neighbours on this machine may win some, or hide a process that is always another one.
TRIES = 5


@needs_root
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_task_wins_where_nothing_contains_it_and_is_told_so(
    unconfined: Unconfined, task: Hostile
) -> None:
    for number in range(TRIES):
        seen = unconfined.run(dataclasses.replace(task, name=f"{task.name}{number or ''}"))
        proof = judge(task, seen, task.weakest, RICH)
        if proof.verdict is not Verdict.CONTAINED:
            break
    assert proof.verdict is Verdict.NOT_CONTAINED, (proof, seen)
    assert proof.evidence.startswith(("reached ", "left ")), proof


def test_neighbour_of_the_tasks_leaves_nothing(unconfined: Unconfined) -> None:
    unconfined._stack.close()
    assert not [name for name in os.listdir("/dev/shm") if unconfined._mark in name]


# What is made of what was seen.


def observed(output: str = "end\n", code: ErrorCode = ErrorCode.NONE, **more: Any) -> Observed:
    left = more.pop("left", ())
    status = Status.SUCCESS if code is ErrorCode.NONE else Status.FAILED
    return Observed(Outcome(status, code, **more), output, left)


def test_task_that_does_not_come_to_its_end_proves_nothing() -> None:
    proof = judge(BY_NAME["privileges"], observed(""), Profile.SEALED, RICH)
    assert proof.verdict is Verdict.NOT_CONTAINED


def test_what_a_task_leaves_is_not_contained() -> None:
    proof = judge(BY_NAME["daemon"], observed(left=("process 7",)), Profile.SEALED, RICH)
    assert (proof.verdict, proof.evidence) == (Verdict.NOT_CONTAINED, "left process 7")


def test_task_that_ends_otherwise_than_it_should_is_not_contained() -> None:
    proof = judge(BY_NAME["memory"], observed(), Profile.SEALED, RICH)
    assert proof.verdict is Verdict.NOT_CONTAINED
    assert "ended otherwise" in proof.evidence


@pytest.mark.parametrize(
    "seen",
    [
        observed("", ErrorCode.SPAWN_FAILED, reason="cannot start the task: x"),
        observed("bash: python3: not found\n", ErrorCode.EXECUTE_FAILED, exit_code=127),
    ],
)
def test_task_that_could_not_be_tried_is_not_taken_for_contained(seen: Observed) -> None:
    proof = judge(BY_NAME["parent"], seen, Profile.SEALED, RICH)
    assert proof.verdict is Verdict.NOT_TRIED
    assert "cannot start" in proof.evidence or "python3: not found" in proof.evidence


def test_what_the_host_lacks_is_not_counted_as_contained() -> None:
    lacking = dataclasses.replace(RICH, obstacles={Feature.NAMESPACES: "the kernel refuses"})
    for seen in (observed(), observed("REACHED it\nend\n")):
        proof = judge(BY_NAME["host-files"], seen, Profile.SEALED, lacking)
        assert proof.verdict is Verdict.NOT_ENFORCED
        assert proof.evidence == "namespaces: the kernel refuses"


def test_one_of_two_features_is_enough() -> None:
    lacking = dataclasses.replace(RICH, root=False)
    proof = judge(BY_NAME["signal-neighbour"], observed(), Profile.PRIVATE, lacking)
    assert proof.verdict is Verdict.CONTAINED
    assert proof.evidence.endswith("(namespaces)")
    proof = judge(BY_NAME["signal-neighbour"], observed(), Profile.PROCESS, lacking)
    assert proof.verdict is Verdict.NOT_ENFORCED
    assert proof.evidence == "own_uid: the worker does not run as root"


def test_what_holds_more_coarsely_is_named_and_can_fail() -> None:
    lacking = dataclasses.replace(
        RICH, controllers=frozenset(), lacks=dict.fromkeys(CONTROLLERS, ("no v2", "boot with it"))
    )
    proof = judge(BY_NAME["processes"], observed(), Profile.SEALED, lacking)
    assert proof.verdict is Verdict.CONTAINED
    assert proof.evidence.startswith("RLIMIT_NPROC")
    failed = judge(BY_NAME["processes"], observed("REACHED 60\nend\n"), Profile.SEALED, lacking)
    assert failed.verdict is Verdict.NOT_CONTAINED


def test_luck_in_a_profile_that_does_not_hold_it_is_not_counted_as_contained() -> None:
    proof = judge(BY_NAME["network"], observed(), Profile.PRIVATE, RICH)
    assert proof.verdict is Verdict.NOT_ENFORCED
    assert "private does not hold this, sealed does" in proof.evidence


def test_names_are_told_apart_and_none_drives_a_terminal() -> None:
    assert len(BY_NAME) == len(TASKS)
    assert printable("a\x1b[2Jb") == "a?[2Jb"
    proof = judge(BY_NAME["devices"], observed("REACHED \x1bx\nend\n"), Profile.PRIVATE, RICH)
    assert proof.evidence == "reached ?x"


def test_every_profile_has_tasks_that_it_is_the_first_to_hold() -> None:
    assert {task.weakest for task in TASKS} == set(Profile)
