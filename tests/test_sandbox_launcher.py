"""The launcher: how a task starts, what is recorded, and what goes on beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_driver import (  # noqa: F401 (fixtures)
    AS_NOBODY,
    IS_ROOT,
    LIMITED,
    USERS,
    Drive,
    Driver,
    children_of,
    drive_fixture,
    launcher_fixture,
    needs_root,
    open_null,
    status_of,
    task_message,
    until,
    wait_readable,
)

from stockade.sandbox import launch_message
from stockade.sandbox.launch_message import (
    GO,
    RLIM_INFINITY,
    Flags,
    Step,
    encode,
)

# ---- Starting ----


def test_task_gets_arguments_as_they_are(drive: Drive) -> None:
    driver = drive()
    arguments = (b"", b"a b", b"\xff\xfe", b"*", b"x" * 100_000)
    script = b'for a in "$@"; do printf "<%s>" "$a"; done'
    driver.go(task_message(argv=(b"sh", b"-c", script, b"zero", *arguments)))
    assert driver.output() == b"".join(b"<" + argument + b">" for argument in arguments)
    assert driver.ended()[0] == 0


def test_task_gets_its_environment_and_nothing_else(drive: Drive) -> None:
    driver = drive()
    environment = (b"B=2", b"A=1", b"EMPTY=", b"BYTES=\xff")
    driver.go(task_message(program=b"/usr/bin/env", argv=(b"env",), environment=environment))
    assert driver.output().splitlines() == list(environment)


def test_task_may_have_no_environment(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(program=b"/usr/bin/env", argv=(b"env",), environment=()))
    assert driver.output() == b""
    assert driver.ended()[0] == 0


def test_message_of_megabytes_is_taken(drive: Drive) -> None:
    driver = drive()
    environment = tuple(b"V%d=" % number + b"x" * 100_000 for number in range(15))
    driver.go(task_message("env | wc -c", environment=(b"PATH=/usr/bin:/bin", *environment)))
    assert int(driver.output()) > 1_500_000
    assert driver.ended()[0] == 0


def test_more_than_exec_takes_is_a_failed_exec(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(argv=(b"sh", b"-c", b"true", *(b"x" * 100_000 for _ in range(70)))))
    assert driver.failed() == (Step.EXEC, errno.E2BIG)


def test_task_starts_in_its_directory_with_its_umask(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("pwd; umask", directory=b"/usr/lib", umask=0o137))
    assert driver.output().split() == [b"/usr/lib", b"0137"]


def test_task_leads_its_own_session(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("cat /proc/$$/stat; echo; cat; sleep 0"))
    fields = driver.output().rpartition(b")")[2].split()
    pid = driver.task_pid()
    ppid, group, session = (int(field) for field in fields[1:4])
    assert (ppid, group, session) == (driver.pid, pid, pid)


def test_task_has_default_signals_and_none_blocked(drive: Drive) -> None:
    driver = drive()  # posix_spawn hands on SIGPIPE and SIGXFSZ, which Python ignores
    driver.go(task_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    for name in (b"SigBlk", b"SigIgn", b"SigCgt", b"SigPnd", b"ShdPnd"):
        assert int(lines[name], 16) == 0, name


def test_task_has_three_descriptors(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("kill -STOP $$"))
    task = driver.task_pid()
    until("the task to stop", lambda: status_of(task)["State"].startswith("T"))
    assert set(os.listdir(f"/proc/{task}/fd")) == {"0", "1", "2"}


@needs_root
def test_task_has_the_ids_it_is_to_have(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert {int(number) for number in lines[b"Uid"].split()} == {USERS.uid}
    assert {int(number) for number in lines[b"Gid"].split()} == {USERS.gid}
    assert {int(number) for number in lines[b"Groups"].split()} == set(USERS.groups)


def test_task_has_no_capability_and_can_gain_none(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert int(lines[b"NoNewPrivs"]) == 1
    names = [b"CapInh", b"CapPrm", b"CapEff", b"CapAmb", *([b"CapBnd"] if IS_ROOT else [])]
    for name in names:
        assert int(lines[name], 16) == 0, name


@needs_root
def test_root_that_stays_root_has_no_capability_either(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status"), users=None))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert {int(number) for number in lines[b"Uid"].split()} == {0}
    for name in (b"CapInh", b"CapPrm", b"CapEff", b"CapAmb", b"CapBnd"):
        assert int(lines[name], 16) == 0, name


@needs_root
@pytest.mark.parametrize(
    "wrapper", [("setpriv", "--inh-caps=+chown"), (*AS_NOBODY, "--inh-caps=+chown")]
)
def test_inheritable_capability_is_not_handed_on(drive: Drive, wrapper: tuple[str, ...]) -> None:
    driver = drive(wrapper=wrapper)
    users = None if "--clear-groups" in wrapper else USERS
    script = "echo ready; grep ^Cap /proc/self/status; exec sleep 60"
    driver.go(task_message(script, users=users))
    names = (b"CapInh:", b"CapPrm:", b"CapEff:", b"CapAmb:")
    lines = [line.split() for line in driver.output_until(b"CapAmb:").splitlines()]
    assert [(line[0], int(line[1], 16)) for line in lines if line[0] in names[:3]] == [
        (name, 0) for name in names[:3]
    ]
    assert int(status_of(driver.pid)["CapInh"], 16) == 0


def test_task_has_its_rlimits(drive: Drive) -> None:
    driver = drive()
    limits = ((resource.RLIMIT_NOFILE, 40, 50), (resource.RLIMIT_CORE, 1, 1))
    driver.go(
        task_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/limits"), rlimits=limits)
    )
    lines = [line.split() for line in driver.output().splitlines()]
    assert [line[3:5] for line in lines if line[:3] == [b"Max", b"open", b"files"]] == [
        [b"40", b"50"]
    ]
    assert [line[4:6] for line in lines if line[:4] == [b"Max", b"core", b"file", b"size"]] == [
        [b"1", b"1"]
    ]


@needs_root
def test_hard_limit_is_raised_while_root(drive: Drive) -> None:
    if not int(status_of("self")["CapEff"], 16) >> 24 & 1:
        pytest.skip("needs CAP_SYS_RESOURCE")
    driver = drive(wrapper=LIMITED)
    driver.go(task_message("ulimit -n; ulimit -Hn", rlimits=((resource.RLIMIT_NOFILE, 30, 200),)))
    assert driver.output() == b"30\n200\n"
    assert driver.ended()[0] == 0


def test_limit_without_end_is_infinity(drive: Drive) -> None:
    driver = drive()
    driver.go(
        task_message("ulimit -t", rlimits=((resource.RLIMIT_CPU, RLIM_INFINITY, RLIM_INFINITY),))
    )
    assert driver.output() == b"unlimited\n"


def test_task_gets_its_own_stdio(drive: Drive) -> None:
    driver = drive()
    with contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(3)]
        for fd in (fd for pair in pipes for fd in pair):
            stack.callback(os.close, fd)
        (stdin, feed), (out, stdout), (err, stderr) = pipes
        driver.go(
            task_message("read a; echo out $a; echo err >&2", flags=Flags.STDIO),
            [stdin, stdout, stderr],
        )
        os.write(feed, b"line\n")
        assert driver.output() == b""
        assert driver.ended()[0] == 0
        assert os.read(out, 1000) == b"out line\n"
        assert os.read(err, 1000) == b"err\n"


# ---- The record ----


@pytest.mark.parametrize("code", [0, 1, 127, 255])
def test_exit_code_is_recorded(drive: Drive, code: int) -> None:
    driver = drive()
    driver.go(task_message(f"exit {code}"))
    assert driver.ended()[0] == code << 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, 34])
def test_signal_is_recorded(drive: Drive, number: int) -> None:
    driver = drive()
    driver.go(task_message(f"kill -{int(number)} $$"))
    assert driver.ended()[0] == number


def test_use_of_resources_is_recorded(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"))
    _, user_us, system_us, maxrss_kb, read_blocks, written_blocks, *_ = driver.ended()
    assert user_us + system_us > 0
    assert maxrss_kb > 0
    assert min(read_blocks, written_blocks) >= 0


def test_times_of_start_and_end_are_recorded(drive: Drive) -> None:
    driver = drive()
    before = time.monotonic_ns(), time.time_ns()
    driver.go(task_message("sleep 0.05"))
    *_, monotonic_ns, unix_ns = driver.ended()
    started = [int(number) for number in driver.record()[0].split()[2:]]
    assert before[0] < started[0] < started[0] + 50_000_000 < monotonic_ns < time.monotonic_ns()
    assert before[1] < started[1] < unix_ns < time.time_ns()


def test_record_is_appended_to(drive: Drive) -> None:
    driver = drive()
    record = driver.open_record()
    os.write(record, b"earlier\n")
    os.close(record)
    driver.go(task_message())
    assert [driver.said() for _ in range(3)] == [b"s", b"e", b""]
    assert [line.split()[0] for line in driver.record()] == ["earlier", "started", "ended"]


def test_started_line_is_there_before_the_program_runs(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("echo $$"))
    pid = int(driver.output_until(b"\n"))
    assert driver.record()[0].startswith(f"started {pid} ")


def test_program_waits_for_the_started_line(drive: Drive) -> None:
    driver = drive()
    driver.put(encode(task_message("echo ran")))
    # A pipe that is full: the launcher sleeps in its write.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"\n" * 4096):
            pass
    os.set_blocking(writer, True)
    try:
        until("the launcher to wait", lambda: status_of(driver.pid)["State"].startswith("S"))
        driver.send(GO, [writer])
        (task,) = until("the child", lambda: children_of(driver.pid))
        until("the child to wait", lambda: status_of(task)["State"][0] in "SZ")
        assert os.readlink(f"/proc/{task}/exe") == os.readlink(f"/proc/{driver.pid}/exe")
        while b"started" not in os.read(reader, 65536):
            pass
        assert driver.output() == b"ran\n"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("changes", "step", "number"),
    [
        ({"program": b"/does/not/exist"}, Step.EXEC, errno.ENOENT),
        ({"program": b"/etc/passwd"}, Step.EXEC, errno.EACCES),
        ({"program": b""}, Step.EXEC, errno.ENOENT),
        ({"directory": b"/does/not/exist"}, Step.DIRECTORY, errno.ENOENT),
        ({"directory": b"/etc/passwd"}, Step.DIRECTORY, errno.ENOTDIR),
        ({"rlimits": ((resource.RLIMIT_NOFILE, 2, 1),)}, Step.RLIMIT, errno.EINVAL),
        ({"rlimits": ((2**32 + 7, 1, 1),)}, Step.RLIMIT, errno.EINVAL),
        ({"filter": bytes(8)}, Step.SECCOMP, errno.EINVAL),
        ({"flags": Flags.CGROUP}, Step.CLONE, errno.EBADF),
    ],
)
def test_step_that_fails_is_recorded(
    drive: Drive, changes: dict[str, Any], step: Step, number: int
) -> None:
    driver = drive()
    driver.go(task_message("echo ran", **changes))
    assert driver.failed() == (step, number)
    assert driver.output() == b""


def test_ruleset_that_is_none_is_a_failed_landlock(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message(flags=Flags.LANDLOCK))
    step, number = driver.failed()
    assert step == Step.LANDLOCK
    assert number in (errno.EBADFD, errno.ENOSYS, errno.EOPNOTSUPP)


@needs_root
def test_directory_is_entered_with_the_rights_of_the_task(drive: Drive, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    driver = drive()
    driver.go(task_message(directory=os.fsencode(tmp_path)))
    assert driver.failed() == (Step.DIRECTORY, errno.EACCES)


def test_task_does_not_run_without_a_record(drive: Drive) -> None:
    driver = drive()
    driver.put(encode(task_message("echo ran")))
    with open(driver.record_path, "rb") as read_only:
        driver.send(GO, [read_only.fileno()])
    assert driver.said() == launch_message.SAYS_FAILED
    assert driver.output() == b""
    assert driver.wait() == 0


def test_task_does_not_run_with_a_full_disk(drive: Drive) -> None:
    driver = drive()
    driver.put(encode(task_message("echo ran")))
    with open("/dev/full", "wb") as full:
        driver.send(GO, [full.fileno()])
    assert driver.said() == launch_message.SAYS_FAILED
    assert driver.output() == b""
    assert driver.wait() == 0


@needs_root
def test_end_on_a_full_disk_is_recorded_when_there_is_room(drive: Drive, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "stockade-test", str(tmp_path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        record, filler = tmp_path / "record", tmp_path / "filler"
        record.touch()
        driver = drive()
        driver.put(encode(task_message("echo ready; read a", flags=Flags.STDIO)))
        stdin, feed = os.pipe()
        with open(record, "ab", buffering=0) as file:
            driver.send(GO, [file.fileno(), stdin, driver_output := open_null(), driver_output])
            os.close(driver_output)
            os.close(stdin)
            assert driver.said() == launch_message.SAYS_STARTED
            # To the end of a page: the next line needs another one.
            page = os.sysconf("SC_PAGE_SIZE")
            file.write(b"\n" * (page - record.stat().st_size))
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        task = int(record.read_text().split()[1])
        os.close(feed)
        until("the task to be reaped", lambda: not Path(f"/proc/{task}").exists())
        assert "ended" not in record.read_text()
        filler.unlink()
        assert [driver.said(), driver.said()] == [launch_message.SAYS_ENDED, b""]
        assert driver.wait() == 0
        assert record.read_text().splitlines()[-1].startswith(f"ended {1 << 8} ")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_spawner_that_went_away_changes_nothing(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("echo ready; read a; exit 3"))
    driver.channel.close()
    driver.output()
    assert driver.wait() == 0
    assert driver.record()[-1].startswith(f"ended {3 << 8} ")


def test_spawner_that_does_not_read_stops_nothing(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("exit 4"))
    assert driver.wait() == 0
    assert driver.record()[-1].startswith(f"ended {4 << 8} ")


# ---- The launcher beside its task ----


def _running(drive: Drive, **arguments: Any) -> Driver:
    driver = drive(**arguments)
    driver.go(task_message("echo ready; exec sleep 60"))
    driver.output_until(b"ready\n")
    assert driver.said() == launch_message.SAYS_STARTED
    return driver


@needs_root
def test_launcher_of_a_running_task_may_kill_and_nothing_else(drive: Drive) -> None:
    status = status_of(_running(drive, wrapper=("setpriv", "--groups=1879199007")).pid)
    assert status["Uid"].split() == [str(USERS.init_uid)] * 4
    assert status["Gid"].split() == [str(USERS.init_gid)] * 4
    assert status["Groups"] == ""
    assert [int(status[name], 16) for name in ("CapPrm", "CapEff")] == [1 << 5, 1 << 5]  # CAP_KILL
    assert [int(status[name], 16) for name in ("CapInh", "CapBnd", "CapAmb")] == [0, 0, 0]
    assert status["NoNewPrivs"] == "1"


def test_launcher_blocks_every_signal_that_can_be(drive: Drive) -> None:
    driver = drive()
    unblockable = 1 << (signal.SIGKILL - 1) | 1 << (signal.SIGSTOP - 1)
    expected = f"{(1 << 64) - 1 & ~unblockable:016x}"
    until("the mask", lambda: status_of(driver.pid)["SigBlk"] == expected)


@needs_root
def test_launcher_is_not_dumpable(drive: Drive) -> None:
    # The kernel gives the files of a process that is not dumpable to root.
    driver = _running(drive)
    task = driver.task_pid()
    assert os.stat(f"/proc/{driver.pid}/environ").st_uid == 0
    assert os.stat(f"/proc/{task}/environ").st_uid == USERS.uid


def test_launcher_of_a_running_task_holds_only_what_it_needs(drive: Drive) -> None:
    driver = _running(drive)
    held = {
        int(name): os.readlink(f"/proc/{driver.pid}/fd/{name}")
        for name in os.listdir(f"/proc/{driver.pid}/fd")
    }
    assert set(held) >= {3, 7, 8}
    assert held[3].startswith("socket:")
    assert held[7] == os.readlink(f"/proc/self/fd/{driver.output_reader}")
    assert held[8] == "/dev/null"
    rest = sorted(held[number].split(" ")[0] for number in set(held) - {3, 7, 8})
    assert rest == ["/memfd:record", "anon_inode:[signalfd]"]


def test_launcher_lets_go_of_the_stdio_of_its_task(drive: Drive) -> None:
    driver = drive()
    null = open_null()
    driver.go(task_message("exec sleep 60", flags=Flags.STDIO), [null, null, null])
    os.close(null)
    assert driver.said() == launch_message.SAYS_STARTED
    assert len(os.listdir(f"/proc/{driver.pid}/fd")) == 5


def test_launcher_closes_what_it_is_not_to_have(drive: Drive) -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        driver = _running(drive)
    finally:
        os.close(descriptor)
    numbers = {int(name) for name in os.listdir(f"/proc/{driver.pid}/fd")}
    assert len(numbers) == 5


def test_output_outlives_its_reader(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("echo ready; read a; echo more; exit $?", flags=Flags(0)))
    driver.output()
    assert driver.ended()[0] == 0


@needs_root
def test_task_cannot_end_its_launcher(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("kill -9 $PPID; echo $?; kill -9 -1; exit 5"))
    assert driver.output().endswith(b"1\n")
    assert driver.ended()[0] == 5 << 8


def test_task_dies_with_its_launcher(drive: Drive) -> None:
    driver = _running(drive)
    task = os.pidfd_open(driver.task_pid())
    try:
        signal.pidfd_send_signal(driver.pidfd, signal.SIGKILL)
        wait_readable(task, "the task's end")
        assert driver.wait() == -signal.SIGKILL
    finally:
        os.close(task)


# ---- Terminating ----


def test_sigterm_reaches_the_whole_process_group(drive: Drive) -> None:
    driver = drive()
    driver.go(
        task_message(
            "trap 'echo parent; wait; exit 7' TERM\n"
            "(trap 'echo child; exit' TERM; echo ready; while :; do sleep 0.01; done) &\n"
            "while :; do sleep 0.01; done"
        )
    )
    driver.output_until(b"ready\n")
    driver.terminate()
    output = driver.output()
    assert b"parent" in output
    assert b"child" in output
    assert driver.ended()[0] == 7 << 8


def test_sigterm_ends_a_task_that_is_stopped(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("kill -STOP $$; sleep 60"))
    task = driver.task_pid()
    until("the task to stop", lambda: status_of(task)["State"].startswith("T"))
    driver.terminate()
    assert driver.ended()[0] == signal.SIGTERM


def test_sigterm_to_a_waiting_launcher_does_not_hit_its_later_task(drive: Drive) -> None:
    driver = drive()
    until("signals to be blocked", lambda: int(status_of(driver.pid)["SigBlk"], 16))
    driver.terminate()
    until("the signal to be taken", lambda: int(status_of(driver.pid)["ShdPnd"], 16) == 0)
    driver.go(task_message("exit 6"))
    assert driver.ended()[0] == 6 << 8


def test_sigterm_sent_right_after_the_packet_reaches_the_task(drive: Drive) -> None:
    driver = drive()
    until("signals to be blocked", lambda: int(status_of(driver.pid)["SigBlk"], 16))
    signal.pidfd_send_signal(driver.pidfd, signal.SIGSTOP)
    until("the launcher to stop", lambda: status_of(driver.pid)["State"].startswith("T"))
    driver.go(task_message("exec sleep 60"))
    driver.terminate()
    signal.pidfd_send_signal(driver.pidfd, signal.SIGCONT)
    assert driver.ended()[0] == signal.SIGTERM


def test_sigterm_after_the_end_of_the_task_hits_nobody(drive: Drive) -> None:
    driver = drive()
    with _orphan(driver, "exit 0"):
        driver.terminate()
        until("the signal to be taken", lambda: int(status_of(driver.pid)["ShdPnd"], 16) == 0)
        assert len(children_of(driver.pid)) == 1
    assert driver.wait() == 0


# ---- Orphans ----


@contextlib.contextmanager
def _orphan(driver: Driver, then: str) -> Iterator[None]:
    """A task that ended and left behind a process that lives until the body is done."""
    stdin, feed = os.pipe()
    null = open_null()
    try:
        driver.go(
            # A background job of sh has /dev/null for its 0, but not for another number.
            task_message(f"exec 3<&0; setsid cat <&3 & {then}", flags=Flags.STDIO),
            [stdin, null, null],
        )
        assert driver.said() == launch_message.SAYS_STARTED
        assert driver.said() == launch_message.SAYS_ENDED
        yield
    finally:
        for fd in (stdin, feed, null):
            os.close(fd)


def test_launcher_stays_until_the_last_orphan_has_ended(drive: Drive) -> None:
    driver = drive()
    with _orphan(driver, "exit 9"):
        assert driver.record()[-1].startswith(f"ended {9 << 8} ")
        assert len(children_of(driver.pid)) == 1
    assert driver.wait() == 0
    assert len(driver.record()) == 2


def test_orphans_are_reaped_while_the_task_runs(drive: Drive) -> None:
    driver = drive()
    driver.go(
        task_message(
            "i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done; echo ready; exec sleep 60"
        )
    )
    driver.output_until(b"ready\n")
    task = driver.task_pid()
    until("the orphans to be reaped", lambda: children_of(driver.pid) == [task])
