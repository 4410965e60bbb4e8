"""The launcher: as an ordinary user, as pid 1, with a cgroup, Landlock and seccomp."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_driver import (  # noqa: F401 (fixtures)
    AS_INIT,
    AS_NOBODY,
    IS_ROOT,
    LIMITED,
    Drive,
    children_of,
    drive_fixture,
    launcher_fixture,
    needs_root,
    status_of,
    task_message,
    until,
)

from stockade.sandbox.launch_message import (
    Flags,
    Step,
)

# ---- Where it runs ----


@needs_root
def test_unprivileged_launcher_runs_its_task(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(task_message("id -u; id -g; exit 3", users=None))
    assert driver.output().split() == [b"65534", b"65534"]
    assert driver.ended()[0] == 3 << 8


@needs_root
def test_unprivileged_launcher_terminates_its_task(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(task_message("echo ready; exec sleep 60", users=None))
    driver.output_until(b"ready")
    assert int(status_of(driver.pid)["CapPrm"], 16) == 0
    driver.terminate()
    assert driver.ended()[0] == signal.SIGTERM


@needs_root
def test_unprivileged_launcher_is_not_dumpable(drive: Drive) -> None:
    # The kernel gives the files of a process that is not dumpable to root.
    driver = drive(wrapper=AS_NOBODY)
    until("it to wait", lambda: os.stat(f"/proc/{driver.pid}/environ").st_uid == 0)
    driver.go(task_message("echo ready; exec sleep 60", users=None))
    driver.output_until(b"ready")
    assert os.stat(f"/proc/{driver.pid}/environ").st_uid == 0
    assert os.stat(f"/proc/{driver.task_pid()}/environ").st_uid == 65534


@needs_root
def test_unprivileged_launcher_refuses_to_change_users(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(task_message())
    driver.assert_refused(errno.EPERM)


@needs_root
def test_unprivileged_launcher_cannot_raise_a_hard_limit(drive: Drive) -> None:
    driver = drive(wrapper=(*LIMITED, *AS_NOBODY))
    driver.go(task_message(users=None, rlimits=((resource.RLIMIT_NOFILE, 30, 200),)))
    assert driver.failed() == (Step.RLIMIT, errno.EPERM)


@needs_root
def test_root_without_the_right_to_change_users_fails(drive: Drive) -> None:
    driver = drive(wrapper=("setpriv", "--bounding-set=-setuid,-setgid"))
    driver.go(task_message("echo ran"))
    step, number = driver.failed()
    assert step in (Step.GROUPS, Step.GID)
    assert number == errno.EPERM
    assert driver.output() == b""


@needs_root
def test_root_that_cannot_empty_the_bounding_set_fails(drive: Drive) -> None:
    driver = drive(wrapper=("setpriv", "--bounding-set=-setpcap"))
    driver.go(task_message("echo ran"))
    assert driver.failed() == (Step.CAPABILITIES, errno.EPERM)
    assert driver.output() == b""


@pytest.fixture
def drive_init(drive: Drive) -> Drive:
    """A driver of launchers that are pid 1 of a pid namespace."""
    probe = subprocess.run([*AS_INIT, "true"], check=False, capture_output=True)
    if not IS_ROOT or probe.returncode:
        pytest.skip("needs root and pid namespaces")
    return lambda: drive(wrapper=AS_INIT)


def test_init_of_a_pid_namespace_records_the_true_status(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(task_message("echo $$; kill -9 $$"))
    assert driver.output() == b"2\n"
    assert driver.ended()[0] == signal.SIGKILL
    assert driver.record()[0].startswith("started 2 ")


def test_init_of_a_pid_namespace_takes_sigterm_from_outside(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(task_message("trap 'exit 8' TERM; echo ready; while :; do sleep 0.01; done"))
    driver.output_until(b"ready")
    (init,) = children_of(driver.pid)
    os.kill(init, signal.SIGTERM)
    assert driver.ended()[0] == 8 << 8


def test_init_of_a_pid_namespace_reaps_orphans(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(
        task_message(
            "i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done; echo ready; exec sleep 60"
        )
    )
    driver.output_until(b"ready")
    (init,) = children_of(driver.pid)
    until("the orphans to be reaped", lambda: len(children_of(init)) == 1)


def test_init_of_a_pid_namespace_cannot_be_killed_from_within(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(task_message("kill -9 1; kill -9 -1; exit 5", users=None))
    assert driver.ended()[0] == 5 << 8


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A fresh cgroup v2 group, removed at the end."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [fields[4] for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"]
    own = [
        line.removeprefix("0::")
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    ]
    if not roots or not own:
        pytest.skip("needs cgroup v2")
    group = Path(roots[0] + own[0]) / f"stockade-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a cgroup of its own: {error}")
    try:
        yield group
    finally:
        if group.exists():
            (group / "cgroup.kill").write_text("1")
            until("the group to be empty", lambda: "populated 0" in _events(group))
            group.rmdir()


def _events(group: Path) -> str:
    return (group / "cgroup.events").read_text()


def test_task_is_born_in_its_cgroup_and_the_launcher_is_not(drive: Drive, cgroup: Path) -> None:
    directory = os.open(cgroup, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        driver = drive(cgroup_fd=directory)
    finally:
        os.close(directory)
    driver.go(task_message("echo ready; exec sleep 60", flags=Flags.CGROUP))
    driver.output_until(b"ready")
    assert (cgroup / "cgroup.procs").read_text().split() == [str(driver.task_pid())]
    assert "populated 1" in _events(cgroup)
    driver.terminate()
    assert driver.ended()[0] == signal.SIGTERM


def test_cgroup_that_is_gone_is_a_failed_clone(drive: Drive, cgroup: Path) -> None:
    directory = os.open(cgroup, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        driver = drive(cgroup_fd=directory)
    finally:
        os.close(directory)
    cgroup.rmdir()
    driver.go(task_message(flags=Flags.CGROUP))
    step, number = driver.failed()
    assert step == Step.CLONE
    assert number in (errno.ENOENT, errno.ENODEV)


@needs_root
def test_task_in_a_cgroup_namespace_sees_its_group_as_the_root(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("cat /proc/self/cgroup", flags=Flags.CGROUP_NAMESPACE))
    assert b"0::/\n" in driver.output()
    assert driver.ended()[0] == 0


@needs_root
def test_cgroup_namespace_without_the_right_to_one_is_a_failed_namespace(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(task_message(users=None, flags=Flags.CGROUP_NAMESPACE))
    assert driver.failed() == (Step.NAMESPACE, errno.EPERM)


# ---- Landlock and seccomp ----


def test_landlock_ruleset_is_enforced(drive: Drive, tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handled = ctypes.c_uint64(1 << 1)  # LANDLOCK_ACCESS_FS_WRITE_FILE, allowed nowhere
    ruleset = libc.syscall(444, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        pytest.skip("needs Landlock")
    target = tmp_path / "file"
    target.touch()
    # The pipe that the task prints to is open already and so not affected.
    driver = drive(ruleset_fd=ruleset)
    driver.go(task_message(f"echo ready; echo x > {target}", users=None, flags=Flags.LANDLOCK))
    os.close(ruleset)
    assert b"ready" in driver.output()
    assert driver.ended()[0] != 0
    assert target.read_text() == ""


def test_seccomp_filter_is_enforced(drive: Drive) -> None:
    uname = {"x86_64": 63, "aarch64": 160}.get(os.uname().machine)
    if uname is None:
        pytest.skip("needs to know a system call's number")
    filter_program = b"".join(
        struct.pack("<HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the number
            (0x15, 0, 1, uname),  # if it is uname
            (0x06, 0, 0, 0x00050000 | errno.EDOM),  # answer EDOM
            (0x06, 0, 0, 0x7FFF0000),  # else allow
        )
    )
    driver = drive()
    driver.go(task_message("uname", filter=filter_program))
    assert os.strerror(errno.EDOM).encode() in driver.output()
    assert driver.ended()[0] == 1 << 8
