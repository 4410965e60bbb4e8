"""A task that cannot be started: its reason names the step, the call, the errno, what mends it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, eventually
from worker_process import processes_that_name

from stockade.platform import cgroup
from stockade.platform.errors import SyscallError
from stockade.sandbox import steps
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.failed_step import CALLS, failed_step
from stockade.sandbox.launch_message import Step
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome
from stockade.sandbox.profiles import Profile, View
from stockade.sandbox.record import FailedLine
from stockade.sandbox.settings import Lifetime, SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner
from stockade.sandbox.system_steps import Keep
from stockade.sandbox.zygote import Ground, Zygote

SOURCES = (Path(__file__).parent.parent / "sandbox").glob("*.c")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes mount namespaces")
Start = Callable[..., Outcome]


@pytest.fixture
def fails() -> Iterator[Start]:
    """Starts one task that cannot be started; its outcome."""
    made: list[SpawnerClient] = []

    def start(
        profile: Profile, argv: list[str], *, view: View | None = None,
        limits: Limits | None = None, directory: str | None = None,
    ) -> Outcome:  # fmt: skip
        client = SpawnerClient(Lifetime.LASTING, profile, view or View())
        made.append(client)
        client.start(1, argv, limits, directory=directory)
        outcome = client.wait_ended(1)
        assert outcome.error_code is ErrorCode.SPAWN_FAILED
        return outcome

    yield start
    for client in made:
        client.close()


# Steps of the launcher.


@pytest.mark.parametrize("profile", [Profile.PRIVATE, Profile.SEALED])
@needs_root
def test_directory_that_the_profile_hides_is_told_with_what_shows_it(
    fails: Start, profile: Profile, place: Path
) -> None:
    outcome = fails(profile, ["/bin/true"], directory=str(place))
    assert outcome.reason.startswith("cannot start the task: directory: chdir: ENOENT (No such")
    assert "--read-only-paths or --read-write-paths" in outcome.reason
    assert "read_only_paths" in outcome.reason


@needs_root
def test_directory_that_is_shown_can_be_started_in(place: Path) -> None:
    client = SpawnerClient(Lifetime.LASTING, Profile.PRIVATE, View(read_only_paths=(str(place),)))
    client.start(1, ["/bin/pwd"], directory=str(place))
    assert client.wait_ended(1).error_code is ErrorCode.NONE
    assert client.output(1).decode() == f"{place}\n"
    client.close()


def test_directory_that_is_not_there_is_not_called_hidden_where_nothing_is(fails: Start) -> None:
    outcome = fails(Profile.PROCESS, ["/bin/true"], directory="/nonexistent")
    assert outcome.reason.endswith("there is no such directory")
    assert "chdir: ENOENT" in outcome.reason


@needs_root
def test_directory_that_the_uid_may_not_enter_is_told_so(fails: Start, place: Path) -> None:
    place.chmod(0o700)
    outcome = fails(Profile.PROCESS, ["/bin/true"], directory=str(place))
    assert "directory: chdir: EACCES (Permission denied)" in outcome.reason
    assert "chmod o+x" in outcome.reason


@needs_root
def test_program_that_the_profile_hides_is_told_with_what_shows_it(
    fails: Start, place: Path
) -> None:
    program = place / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    outcome = fails(Profile.PRIVATE, [str(program)])
    assert "exec: execve: ENOENT" in outcome.reason
    assert "--read-only-paths" in outcome.reason


def test_program_of_no_known_kind_is_told_so(fails: Start, place: Path) -> None:
    program = place / "program"
    program.write_text("not a program")
    program.chmod(0o755)
    outcome = fails(Profile.PROCESS, [str(program)])
    assert "exec: execve: ENOEXEC" in outcome.reason
    assert "#!" in outcome.reason


@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize("is_confined", [False, True])
def test_every_step_is_told_with_its_call_and_error(step: Step, *, is_confined: bool) -> None:
    text = failed_step(FailedLine(step.value, errno.EPERM), is_confined=is_confined)
    assert f"{step}: {CALLS[step]}: EPERM (Operation not permitted)" in text
    assert "\n" not in text


def test_calls_are_those_that_the_launcher_makes() -> None:
    source = "".join(file.read_text() for file in SOURCES)
    for step, call in CALLS.items():
        name = re.sub(r"\(.*", "", call)
        assert re.search(rf"\b(SYS_)?{name}(64)?\b", source), (step, call)


def test_step_of_another_version_is_told_all_the_same() -> None:
    text = failed_step(FailedLine("newstep", errno.EIO), is_confined=False)
    assert text == "cannot start the task: newstep: EIO (Input/output error)"


# Steps of the slot's child, and of what all slots share.


@needs_root
def test_step_of_the_slots_child_without_room_is_told_with_what_mends_it(
    fails: Start, place: Path
) -> None:
    # Each path that is shown in /tmp takes an inode there, of which so little memory allows 1024.
    shown = [place / str(number) for number in range(1050)]
    for path in shown:
        path.mkdir()
    view = View(read_only_paths=tuple(map(str, shown)))
    outcome = fails(
        Profile.PRIVATE, ["/bin/true"], view=view, limits=Limits(memory_max=MIB)
    )  # fmt: skip
    assert re.match(rf"cannot prepare the slot: cannot show {place}/\d+: ", outcome.reason)
    assert "ENOSPC (No space left on device)" in outcome.reason
    assert "raise memory_max" in outcome.reason


@needs_root
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nonexistent", ("cannot keep /nonexistent", "open_tree(", "ENOENT", "must be there")),
        ("/proc/sys", ("cannot show /proc/sys", "EROFS", "not in /proc")),
    ],
)
def test_path_that_cannot_be_shown_stops_the_start_with_its_reason(
    path: str, words: tuple[str, ...]
) -> None:
    client = SpawnerClient()
    try:
        other = dataclasses.replace(
            client.settings,
            runtime_dir=str(client.home / "other"),
            state_dir=str(client.home / "other-state"),
            view=View(read_only_paths=(path,)),
        )
        with pytest.raises(SandboxSetupError) as raised:
            start_spawner(other)
        for word in words:
            assert word in str(raised.value)
    finally:
        client.close()


@needs_root
def test_spawner_that_cannot_be_set_up_leaves_neither_group_nor_process(place: Path) -> None:
    settings = SpawnerSettings(
        worker_id=place.name, runtime_dir=str(place / "run"), state_dir=str(place / "state"),
        supervisor_uid=0, supervisor_gid=0, uid_min=1879045000, uid_max=1879045010,
        view=View(read_only_paths=("/nonexistent",)),
    )  # fmt: skip
    with pytest.raises(SandboxSetupError, match="cannot keep /nonexistent"):
        start_spawner(settings)
    mount = cgroup.find_mount()
    assert mount is not None
    eventually(lambda: not [path for path, _, _ in os.walk(mount) if place.name in path])
    eventually(lambda: not processes_that_name(place.name))


@needs_root
def test_zygote_that_cannot_be_made_names_its_step() -> None:
    ground = Ground((Keep("/nonexistent", writable=False),), True, "/", 0)
    with pytest.raises(SandboxSetupError, match=r"cannot keep /nonexistent.*ENOENT"):
        Zygote(ground)


class _Refused:
    def __init__(self, error: OSError) -> None:
        self._error = error

    def __str__(self) -> str:
        return "do a thing"

    def apply(self, _kept: dict[str, int]) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            SyscallError("mount", "'x'", errno.EPERM),
            "cannot do a thing: mount('x'): EPERM (Operation not permitted); `stockade doctor`",
        ),
        (
            FileNotFoundError(errno.ENOENT, "x", "/a"),
            "cannot do a thing: /a: ENOENT (No such file or directory); what read_only_paths",
        ),
        (OSError(errno.EIO, "x"), "cannot do a thing: EIO (Input/output error)"),
    ],
)
def test_step_that_the_kernel_refuses_is_told_with_call_error_and_hint(
    error: OSError, text: str
) -> None:
    with pytest.raises(SandboxSetupError) as raised:
        steps.run([_Refused(error)], {})
    assert str(raised.value).startswith(text)
    assert raised.value.step == "do a thing"
