"""The launcher, driven as the spawner drives it: real sockets, memfds and processes.

Every test here runs against the launcher as installed and against one with ASan and UBSan, whose
reports show as exit code 99.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stockade.sandbox import launch_message
from stockade.sandbox.launch_message import (
    GO,
    HEADER,
    HEADER_FIELDS,
    RLIM_INFINITY,
    Flags,
    LaunchMessage,
    Step,
    Users,
    encode,
)

DEADLINE_S = 30.0
SANITIZER_EXIT = 99
SOURCE = Path(launch_message.__file__).with_name("launcher.c")
WARNINGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wshadow"]
USERS = Users(
    uid=1_879_199_001,
    gid=1_879_199_002,
    init_uid=1_879_199_003,
    init_gid=1_879_199_004,
    groups=(1_879_199_005, 1_879_199_006),
)
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
AS_INIT = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
LIMITED = ("prlimit", "--nofile=100:100")
IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root, to change users")


# ---- Building ----


def _gcc(*arguments: str | Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = subprocess.run(
        [compiler, *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="session", params=["installed", "sanitized"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A launcher that every user can execute."""
    directory = Path(tempfile.mkdtemp(prefix="stockade-launcher-"))
    directory.chmod(0o755)
    program = directory / "launcher"
    try:
        if request.param == "installed":
            shutil.copy(SOURCE.with_name("launcher"), program)
        else:
            # The environment is empty at exec, so the options are built in.
            options = directory / "options.c"
            options.write_text(
                "const char *__asan_default_options(void);\n"
                "const char *__asan_default_options(void)\n"
                f'{{ return "exitcode={SANITIZER_EXIT}:detect_leaks=0"; }}\n'
            )
            _gcc(
                *WARNINGS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                "-o", program, SOURCE, options,
            )  # fmt: skip
        program.chmod(0o755)
        yield program
    finally:
        shutil.rmtree(directory)


# ---- Driving ----


def _until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
    return value


def _wait_readable(fd: int, what: str) -> None:
    ready, _, _ = select.select([fd], [], [], DEADLINE_S)
    assert ready, f"waited in vain for {what}"


class Driver:
    """A waiting launcher and the spawner's ends of what it holds."""

    def __init__(
        self, program: Path, *, wrapper: Sequence[str] = (), cgroup_fd: int | None = None
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        self.memfd = os.memfd_create("message")
        self.output_reader, output = os.pipe()
        self.record_path = f"/proc/self/fd/{(record := os.memfd_create('record'))}"
        self._record = record
        null = os.open("/dev/null", os.O_RDWR)
        cgroup = null if cgroup_fd is None else cgroup_fd
        # Numbers far above the fixed ones, so that no dup2 hits the source of a later one.
        sources = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)
            for fd in (
                null, output, output, theirs.fileno(), self.memfd, cgroup, self.output_reader, null,
            )
        ]  # fmt: skip
        command = [*wrapper, str(program)]
        self.pid = os.posix_spawn(
            shutil.which(command[0]) or command[0],
            command,
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(sources)],
            setsid=True,
        )
        self.pidfd = os.pidfd_open(self.pid)
        for fd in (*sources, null, output):
            os.close(fd)
        theirs.close()
        self.exit_code: int | None = None
        self._printed = b""

    def close(self) -> None:
        if self.exit_code is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.channel.close()
        for fd in (self.memfd, self.output_reader, self._record, self.pidfd):
            os.close(fd)

    def put(self, message: bytes) -> None:
        os.pwrite(self.memfd, message, 0)

    def open_record(self, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
        return os.open(self.record_path, flags)

    def send(self, packet: bytes, descriptors: Sequence[int]) -> None:
        # One that has ended already is as good as one that does not read.
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self.channel, [packet], list(descriptors))

    def go(self, message: LaunchMessage | bytes, descriptors: Sequence[int] = ()) -> None:
        self.put(message if isinstance(message, bytes) else encode(message))
        record = self.open_record()
        try:
            self.send(GO, [record, *descriptors])
        finally:
            os.close(record)

    def said(self) -> bytes:
        """The next packet, empty at the end."""
        _wait_readable(self.channel.fileno(), "a packet")
        try:
            return self.channel.recv(100)
        except ConnectionResetError:  # it ended with one of our packets unread
            return b""

    def wait(self) -> int:
        """The launcher's exit code, negative for a signal."""
        _wait_readable(self.pidfd, "the launcher's end")
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def record(self) -> list[str]:
        text = os.pread(self._record, 4096, 0).decode()
        assert not text or text.endswith("\n")
        return text.splitlines()

    def output_until(self, text: bytes) -> bytes:
        while text not in self._printed:
            _wait_readable(self.output_reader, f"{text!r} in the output")
            read = os.read(self.output_reader, 65536)
            assert read, f"no {text!r} in {self._printed!r}"
            self._printed += read
        return self._printed

    def output(self) -> bytes:
        """Everything, after all who could print have let go of the pipe."""
        while True:
            _wait_readable(self.output_reader, "the end of the output")
            if not (read := os.read(self.output_reader, 65536)):
                return self._printed
            self._printed += read

    def terminate(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def task_pid(self) -> int:
        started = _until("the started line", self.record)[0].split()
        assert started[0] == launch_message.RECORD_STARTED
        return int(started[1])

    def ended(self) -> list[int]:
        """Waits for the end of a task that leaves nothing behind; the ended line's numbers."""
        assert self.said() == launch_message.SAYS_STARTED
        assert self.said() == b""
        assert self.wait() == 0
        started, ended = self.record()
        assert started.split()[0] == launch_message.RECORD_STARTED
        word, *numbers = ended.split()
        assert word == launch_message.RECORD_ENDED
        assert len(numbers) == 8
        return [int(number) for number in numbers]

    def failed(self) -> tuple[str, int]:
        """Waits for the end; step and error number of the failed line, which is the last."""
        assert self.said() == launch_message.SAYS_FAILED
        assert self.wait() == 0
        word, step, number = self.record()[-1].split()
        assert word == launch_message.RECORD_FAILED
        return step, int(number)


@pytest.fixture
def drive(launcher: Path) -> Iterator[Callable[..., Driver]]:
    with contextlib.ExitStack() as stack:

        def start(**arguments: Any) -> Driver:
            driver = Driver(launcher, **arguments)
            stack.callback(driver.close)
            return driver

        yield start


def _message(script: str = "exit 0", **changes: Any) -> LaunchMessage:
    message = LaunchMessage(
        program=b"/bin/sh",
        argv=(b"sh", b"-c", script.encode()),
        environment=(b"PATH=/usr/bin:/bin",),
        directory=b"/",
        users=USERS if IS_ROOT else None,
    )
    return dataclasses.replace(message, **changes)


def _status(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


Drive = Callable[..., Driver]


# ---- Starting ----


def test_task_gets_arguments_as_they_are(drive: Drive) -> None:
    driver = drive()
    arguments = (b"", b"a b", b"\xff\xfe", b"*", b"x" * 100_000)
    script = b'for a in "$@"; do printf "<%s>" "$a"; done'
    driver.go(_message(argv=(b"sh", b"-c", script, b"zero", *arguments)))
    assert driver.output() == b"".join(b"<" + argument + b">" for argument in arguments)
    assert driver.ended()[0] == 0


def test_task_gets_its_environment_and_nothing_else(drive: Drive) -> None:
    driver = drive()
    environment = (b"B=2", b"A=1", b"EMPTY=", b"BYTES=\xff")
    driver.go(_message(program=b"/usr/bin/env", argv=(b"env",), environment=environment))
    assert driver.output().splitlines() == list(environment)


def test_task_may_have_no_environment(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(program=b"/usr/bin/env", argv=(b"env",), environment=()))
    assert driver.output() == b""
    assert driver.ended()[0] == 0


def test_message_of_megabytes_is_taken(drive: Drive) -> None:
    driver = drive()
    environment = tuple(b"V%d=" % number + b"x" * 100_000 for number in range(15))
    driver.go(_message("env | wc -c", environment=(b"PATH=/usr/bin:/bin", *environment)))
    assert int(driver.output()) > 1_500_000
    assert driver.ended()[0] == 0


def test_more_than_exec_takes_is_a_failed_exec(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(argv=(b"sh", b"-c", b"true", *(b"x" * 100_000 for _ in range(70)))))
    assert driver.failed() == (Step.EXEC, errno.E2BIG)


def test_task_starts_in_its_directory_with_its_umask(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("pwd; umask", directory=b"/usr/lib", umask=0o137))
    assert driver.output().split() == [b"/usr/lib", b"0137"]


def test_task_leads_its_own_session(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("cat /proc/$$/stat; echo; cat; sleep 0"))
    fields = driver.output().rpartition(b")")[2].split()
    pid = driver.task_pid()
    ppid, group, session = (int(field) for field in fields[1:4])
    assert (ppid, group, session) == (driver.pid, pid, pid)


def test_task_has_default_signals_and_none_blocked(drive: Drive) -> None:
    driver = drive()  # posix_spawn hands on SIGPIPE and SIGXFSZ, which Python ignores
    driver.go(_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    for name in (b"SigBlk", b"SigIgn", b"SigCgt", b"SigPnd", b"ShdPnd"):
        assert int(lines[name], 16) == 0, name


def test_task_has_three_descriptors(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("echo ready; exec sleep 60"))
    driver.output_until(b"ready\n")
    task = driver.task_pid()
    _until("the exec of sleep", lambda: Path(f"/proc/{task}/comm").read_text() == "sleep\n")
    assert set(os.listdir(f"/proc/{task}/fd")) == {"0", "1", "2"}


@needs_root
def test_task_has_the_ids_it_is_to_have(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert {int(number) for number in lines[b"Uid"].split()} == {USERS.uid}
    assert {int(number) for number in lines[b"Gid"].split()} == {USERS.gid}
    assert {int(number) for number in lines[b"Groups"].split()} == set(USERS.groups)


def test_task_has_no_capability_and_can_gain_none(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status")))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert int(lines[b"NoNewPrivs"]) == 1
    names = [b"CapInh", b"CapPrm", b"CapEff", b"CapAmb", *([b"CapBnd"] if IS_ROOT else [])]
    for name in names:
        assert int(lines[name], 16) == 0, name


@needs_root
def test_root_that_stays_root_has_no_capability_either(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/status"), users=None))
    lines = dict(line.split(b":", 1) for line in driver.output().splitlines())
    assert {int(number) for number in lines[b"Uid"].split()} == {0}
    for name in (b"CapInh", b"CapPrm", b"CapEff", b"CapAmb", b"CapBnd"):
        assert int(lines[name], 16) == 0, name


def test_task_has_its_rlimits(drive: Drive) -> None:
    driver = drive()
    limits = ((resource.RLIMIT_NOFILE, 40, 50), (resource.RLIMIT_CORE, 1, 1))
    driver.go(_message(program=b"/bin/cat", argv=(b"cat", b"/proc/self/limits"), rlimits=limits))
    lines = [line.split() for line in driver.output().splitlines()]
    assert [line[3:5] for line in lines if line[:3] == [b"Max", b"open", b"files"]] == [
        [b"40", b"50"]
    ]
    assert [line[4:6] for line in lines if line[:4] == [b"Max", b"core", b"file", b"size"]] == [
        [b"1", b"1"]
    ]


@needs_root
def test_hard_limit_is_raised_while_root(drive: Drive) -> None:
    driver = drive(wrapper=LIMITED)
    driver.go(_message("ulimit -n; ulimit -Hn", rlimits=((resource.RLIMIT_NOFILE, 30, 200),)))
    assert driver.output() == b"30\n200\n"
    assert driver.ended()[0] == 0


def test_limit_without_end_is_infinity(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("ulimit -t", rlimits=((resource.RLIMIT_CPU, RLIM_INFINITY, RLIM_INFINITY),)))
    assert driver.output() == b"unlimited\n"


def test_task_gets_its_own_stdio(drive: Drive) -> None:
    driver = drive()
    with contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(3)]
        for fd in (fd for pair in pipes for fd in pair):
            stack.callback(os.close, fd)
        (stdin, feed), (out, stdout), (err, stderr) = pipes
        driver.go(
            _message("read a; echo out $a; echo err >&2", flags=Flags.STDIO),
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
    driver.go(_message(f"exit {code}"))
    assert driver.ended()[0] == code << 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, 34])
def test_signal_is_recorded(drive: Drive, number: int) -> None:
    driver = drive()
    driver.go(_message(f"kill -{int(number)} $$"))
    assert driver.ended()[0] == number


def test_use_of_resources_is_recorded(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"))
    _, user_us, system_us, maxrss_kb, read_blocks, written_blocks, *_ = driver.ended()
    assert user_us + system_us > 0
    assert maxrss_kb > 0
    assert min(read_blocks, written_blocks) >= 0


def test_times_of_start_and_end_are_recorded(drive: Drive) -> None:
    driver = drive()
    before = time.monotonic_ns(), time.time_ns()
    driver.go(_message("sleep 0.05"))
    *_, monotonic_ns, unix_ns = driver.ended()
    started = [int(number) for number in driver.record()[0].split()[2:]]
    assert before[0] < started[0] < started[0] + 50_000_000 < monotonic_ns < time.monotonic_ns()
    assert before[1] < started[1] < unix_ns < time.time_ns()


def test_record_is_appended_to(drive: Drive) -> None:
    driver = drive()
    record = driver.open_record()
    os.write(record, b"earlier\n")
    os.close(record)
    driver.go(_message())
    assert [driver.said(), driver.said()] == [b"s", b""]
    assert [line.split()[0] for line in driver.record()] == ["earlier", "started", "ended"]


def test_started_line_is_there_before_the_program_runs(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("echo $$"))
    pid = int(driver.output_until(b"\n"))
    assert driver.record()[0].startswith(f"started {pid} ")


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
    driver.go(_message("echo ran", **changes))
    assert driver.failed() == (step, number)
    assert driver.output() == b""


def test_ruleset_that_is_none_is_a_failed_landlock(drive: Drive) -> None:
    driver = drive()
    driver.go(_message(flags=Flags.LANDLOCK), [driver.memfd])
    step, number = driver.failed()
    assert step == Step.LANDLOCK
    assert number in (errno.EBADFD, errno.ENOSYS, errno.EOPNOTSUPP)


@needs_root
def test_directory_is_entered_with_the_rights_of_the_task(drive: Drive, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    driver = drive()
    driver.go(_message(directory=os.fsencode(tmp_path)))
    assert driver.failed() == (Step.DIRECTORY, errno.EACCES)


def test_task_does_not_run_without_a_record(drive: Drive) -> None:
    driver = drive()
    driver.put(encode(_message("echo ran")))
    with open(driver.record_path, "rb") as read_only:
        driver.send(GO, [read_only.fileno()])
    assert driver.said() == launch_message.SAYS_FAILED
    assert driver.output() == b""
    assert driver.wait() == 0


def test_task_does_not_run_with_a_full_disk(drive: Drive) -> None:
    driver = drive()
    driver.put(encode(_message("echo ran")))
    with open("/dev/full", "wb") as full:
        driver.send(GO, [full.fileno()])
    assert driver.said() == launch_message.SAYS_FAILED
    assert driver.output() == b""
    assert driver.wait() == 0


@needs_root
def test_end_on_a_full_disk_is_recorded_when_there_is_room(drive: Drive, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "stockade-test", tmp_path]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        record, filler = tmp_path / "record", tmp_path / "filler"
        record.touch()
        driver = drive()
        driver.put(encode(_message("echo ready; read a", flags=Flags.STDIO)))
        stdin, feed = os.pipe()
        with open(record, "ab", buffering=0) as file:
            driver.send(GO, [file.fileno(), stdin, driver_output := _null(), driver_output])
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
        _until("the task to be reaped", lambda: not Path(f"/proc/{task}").exists())
        assert "ended" not in record.read_text()
        filler.unlink()
        assert driver.said() == b""
        assert driver.wait() == 0
        assert record.read_text().splitlines()[-1].startswith(f"ended {1 << 8} ")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _null() -> int:
    return os.open("/dev/null", os.O_RDWR)


def test_spawner_that_went_away_changes_nothing(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("echo ready; read a; exit 3"))
    driver.channel.close()
    driver.output()
    assert driver.wait() == 0
    assert driver.record()[-1].startswith(f"ended {3 << 8} ")


def test_spawner_that_does_not_read_stops_nothing(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("exit 4"))
    assert driver.wait() == 0
    assert driver.record()[-1].startswith(f"ended {4 << 8} ")


# ---- The launcher beside its task ----


def _running(drive: Drive, **arguments: Any) -> Driver:
    driver = drive(**arguments)
    driver.go(_message("echo ready; exec sleep 60"))
    driver.output_until(b"ready\n")
    assert driver.said() == launch_message.SAYS_STARTED
    return driver


@needs_root
def test_launcher_of_a_running_task_may_kill_and_nothing_else(drive: Drive) -> None:
    status = _status(_running(drive).pid)
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
    _until("the mask", lambda: _status(driver.pid)["SigBlk"] == expected)


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
    assert set(held) >= {3, 6, 7}
    assert held[3].startswith("socket:")
    assert held[6] == os.readlink(f"/proc/self/fd/{driver.output_reader}")
    assert held[7] == "/dev/null"
    rest = sorted(held[number].split(" ")[0] for number in set(held) - {3, 6, 7})
    assert rest == ["/memfd:record", "anon_inode:[signalfd]"]


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
    driver.go(_message("echo ready; read a; echo more; exit $?", flags=Flags(0)))
    driver.output()
    assert driver.ended()[0] == 0


@needs_root
def test_task_cannot_end_its_launcher(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("kill -9 $PPID; echo $?; kill -9 -1; exit 5"))
    assert driver.output().endswith(b"1\n")
    assert driver.ended()[0] == 5 << 8


def test_task_dies_with_its_launcher(drive: Drive) -> None:
    driver = _running(drive)
    task = os.pidfd_open(driver.task_pid())
    try:
        signal.pidfd_send_signal(driver.pidfd, signal.SIGKILL)
        _wait_readable(task, "the task's end")
        assert driver.wait() == -signal.SIGKILL
    finally:
        os.close(task)


# ---- Terminating ----


def test_sigterm_reaches_the_whole_process_group(drive: Drive) -> None:
    driver = drive()
    driver.go(
        _message(
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
    driver.go(_message("kill -STOP $$; sleep 60"))
    task = driver.task_pid()
    _until("the task to stop", lambda: _status(task)["State"].startswith("T"))
    driver.terminate()
    assert driver.ended()[0] == signal.SIGTERM


def test_sigterm_to_a_waiting_launcher_does_not_hit_its_later_task(drive: Drive) -> None:
    driver = drive()
    _until("signals to be blocked", lambda: int(_status(driver.pid)["SigBlk"], 16))
    driver.terminate()
    _until("the signal to be taken", lambda: int(_status(driver.pid)["ShdPnd"], 16) == 0)
    driver.go(_message("exit 6"))
    assert driver.ended()[0] == 6 << 8


def test_sigterm_sent_right_after_the_packet_reaches_the_task(drive: Drive) -> None:
    driver = drive()
    _until("signals to be blocked", lambda: int(_status(driver.pid)["SigBlk"], 16))
    signal.pidfd_send_signal(driver.pidfd, signal.SIGSTOP)
    _until("the launcher to stop", lambda: _status(driver.pid)["State"].startswith("T"))
    driver.go(_message("exec sleep 60"))
    driver.terminate()
    signal.pidfd_send_signal(driver.pidfd, signal.SIGCONT)
    assert driver.ended()[0] == signal.SIGTERM


def test_sigterm_after_the_end_of_the_task_hits_nobody(drive: Drive) -> None:
    driver = drive()
    with _orphan(driver, "exit 0"):
        driver.terminate()
        _until("the signal to be taken", lambda: int(_status(driver.pid)["ShdPnd"], 16) == 0)
        assert len(_children(driver.pid)) == 1
    assert driver.wait() == 0


# ---- Orphans ----


@contextlib.contextmanager
def _orphan(driver: Driver, then: str) -> Iterator[None]:
    """A task that ended and left behind a process that lives until the body is done."""
    stdin, feed = os.pipe()
    null = _null()
    try:
        driver.go(
            # A background job of sh has /dev/null for its 0, but not for another number.
            _message(f"exec 3<&0; setsid cat <&3 & {then}", flags=Flags.STDIO),
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
        assert len(_children(driver.pid)) == 1
    assert driver.wait() == 0
    assert len(driver.record()) == 2


def test_orphans_are_reaped_while_the_task_runs(drive: Drive) -> None:
    driver = drive()
    driver.go(
        _message(
            "i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done; echo ready; exec sleep 60"
        )
    )
    driver.output_until(b"ready\n")
    task = driver.task_pid()
    _until("the orphans to be reaped", lambda: _children(driver.pid) == [task])


# ---- Packets and messages that are not as they should be ----


def _assert_refused(driver: Driver, number: int = errno.EINVAL) -> None:
    assert driver.wait() == 1
    assert driver.record() == [f"failed message {number}"]
    assert driver.output() == b""


def test_launcher_whose_channel_closes_ends_in_silence(drive: Drive) -> None:
    driver = drive()
    driver.channel.close()
    assert driver.wait() == 0
    assert driver.record() == []


def test_packet_without_a_message_is_refused(drive: Drive) -> None:
    driver = drive()
    driver.go(b"")
    _assert_refused(driver)


@pytest.mark.parametrize("packet", [b"g", b"GG", b"\0", b"G" * 60_000])
def test_another_packet_is_refused(drive: Drive, packet: bytes) -> None:
    driver = drive()
    driver.put(encode(_message()))
    record = driver.open_record()
    driver.send(packet, [record])
    os.close(record)
    _assert_refused(driver)


@pytest.mark.parametrize("packet", [b"G", b"x", b"GG"])
def test_packet_without_a_record_ends_the_launcher(drive: Drive, packet: bytes) -> None:
    driver = drive()
    driver.put(encode(_message("echo ran")))
    driver.send(packet, [])
    assert driver.wait() == 1
    assert driver.output() == b""


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (Flags(0), 2), (Flags(0), 5), (Flags(0), 6), (Flags(0), 7), (Flags(0), 200),
        (Flags.STDIO, 1), (Flags.STDIO, 2), (Flags.STDIO, 3), (Flags.STDIO, 5),
        (Flags.LANDLOCK, 1), (Flags.LANDLOCK, 3),
        (Flags.STDIO | Flags.LANDLOCK, 4), (Flags.STDIO | Flags.LANDLOCK, 6),
    ],
)  # fmt: skip
def test_wrong_number_of_descriptors_is_refused(drive: Drive, flags: Flags, count: int) -> None:
    driver = drive()
    null = _null()
    driver.go(_message(flags=flags), [null] * (count - 1))
    os.close(null)
    _assert_refused(driver)


def test_second_packet_is_not_read(drive: Drive) -> None:
    driver = drive()
    driver.go(_message("echo once"))
    driver.go(_message("echo once"))
    assert driver.output() == b"once\n"
    assert [driver.said(), driver.said()] == [b"s", b""]
    assert driver.wait() == 0
    assert [line.split()[0] for line in driver.record()] == ["started", "ended"]


@pytest.mark.parametrize("missing", range(8))
def test_launcher_that_lacks_a_descriptor_ends(launcher: Path, missing: int) -> None:
    null = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 100)
    actions: list[tuple[int, ...]] = [
        (os.POSIX_SPAWN_DUP2, null, number) for number in range(8) if number != missing
    ]
    actions.append((os.POSIX_SPAWN_CLOSE, missing))
    pid = os.posix_spawn(launcher, ["launcher"], {}, file_actions=actions)
    os.close(null)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def _fields(message: bytes, **changes: int) -> bytes:
    fields = dict(zip(HEADER_FIELDS, HEADER.unpack_from(message), strict=True))
    return HEADER.pack(*(fields | changes).values()) + message[HEADER.size :]


GOOD = encode(
    LaunchMessage(
        program=b"/does/not/exist",
        argv=(b"a", b"b"),
        environment=(b"C=d",),
        directory=b"/",
        rlimits=((resource.RLIMIT_CORE, 1, 1),),
        filter=struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000),  # return SECCOMP_RET_ALLOW
    )
)
STRINGS_BYTES = HEADER.unpack_from(GOOD)[HEADER_FIELDS.index("strings_bytes")]
COUNTS = ("group_count", "rlimit_count", "filter_count", "argc", "envc", "strings_bytes")


def test_message_that_the_hostile_ones_are_made_from_is_good(drive: Drive) -> None:
    driver = drive()
    driver.go(GOOD)
    assert driver.failed() == (Step.EXEC, errno.ENOENT)


@pytest.mark.parametrize(
    "message",
    [
        *(GOOD[:length] for length in (1, 4, 63, 64, 65, len(GOOD) - 1)),
        GOOD + b"\0",
        GOOD + GOOD,
        GOOD[:-1] + b"x",
        bytes(64),
        b"\xff" * 200,
        _fields(GOOD, magic=0),
        _fields(GOOD, version=0),
        _fields(GOOD, version=2),
        _fields(GOOD, reserved=1),
        _fields(GOOD, umask=0o1000),
        _fields(GOOD, flags=Flags.SAME_USER | 32),
        _fields(GOOD, flags=0),
        _fields(GOOD, flags=Flags.SAME_USER | Flags.CHANGE_USER),
        _fields(GOOD, argc=0, envc=3),
        _fields(GOOD, argc=1),
        _fields(GOOD, argc=3),
        _fields(GOOD, argc=2**32 - 1, envc=4),  # the sum wraps to 3
        _fields(GOOD, argc=2**31 + 2, envc=2**31 + 1),
        _fields(GOOD, group_count=2**30),  # 4 times that wraps to 0
        _fields(GOOD, filter_count=2**29 + 1),  # 8 times that wraps to 8
        _fields(GOOD, rlimit_count=0xAAAAAAAB + 1),  # 24 times that is 2**36 + 32
        _fields(GOOD, strings_bytes=STRINGS_BYTES + 1),
        _fields(GOOD, strings_bytes=STRINGS_BYTES - 1),
        _fields(GOOD, strings_bytes=0),
        _fields(GOOD, total_bytes=len(GOOD) + 1),
        _fields(GOOD, total_bytes=len(GOOD) - 1),
        _fields(GOOD + bytes(4), total_bytes=len(GOOD) + 4, group_count=1),
        *(_fields(GOOD, **{name: 2**32 - 1}) for name in ("total_bytes", *COUNTS)),
        *(_fields(GOOD, **{name: 2**31}) for name in ("total_bytes", *COUNTS)),
    ],
)  # fmt: skip
def test_hostile_message_is_refused(drive: Drive, message: bytes) -> None:
    driver = drive()
    driver.go(message)
    _assert_refused(driver)


def test_message_that_fills_the_buffer_or_more_is_refused(drive: Drive) -> None:
    for size in (launch_message.MESSAGE_MAX + 1, launch_message.MESSAGE_MAX * 2):
        driver = drive()
        os.truncate(driver.memfd, size)
        driver.go(_fields(GOOD, total_bytes=size, strings_bytes=size - len(GOOD) + STRINGS_BYTES))
        _assert_refused(driver)


def test_most_strings_that_are_allowed_fit_the_table(drive: Drive) -> None:
    most = launch_message.STRINGS_MAX
    driver = drive()
    driver.go(_message(argv=(b"",) * most, environment=(b"",) * most))
    step, number = driver.failed()
    assert (step, number) == (Step.EXEC, errno.E2BIG)
    driver = drive()
    message = encode(_message(argv=(b"",) * most, environment=(b"",) * most))
    driver.go(_fields(message, argc=most - 1, envc=most + 1))
    _assert_refused(driver)


def test_message_that_is_no_file_is_refused(launcher: Path) -> None:
    # What descriptor 4 is does not matter: nothing but a file can be read at an offset.
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(ours.close)
        numbers = [fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 100)] * 8
        theirs.close()
        pid = os.posix_spawn(
            launcher,
            ["launcher"],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(numbers)],
        )
        os.close(numbers[0])
        record = os.memfd_create("record")
        stack.callback(os.close, record)
        socket.send_fds(ours, [GO], [record])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert os.pread(record, 100, 0) == b"failed message %d\n" % errno.EINVAL


@needs_root
@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 0}, {"gid": 0}, {"init_uid": 0}, {"init_gid": 0},
        {"uid": 2**32 - 1}, {"gid": 2**32 - 1}, {"init_uid": 2**32 - 1}, {"init_gid": 2**32 - 1},
        {"uid": USERS.init_uid},
    ],
)  # fmt: skip
def test_ids_that_leave_somebody_root_or_alike_are_refused(
    drive: Drive, changes: dict[str, int]
) -> None:
    driver = drive()
    driver.go(_fields(encode(_message()), **changes))
    _assert_refused(driver)


@needs_root
@pytest.mark.parametrize("group", [0, 2**32 - 1])
def test_group_of_root_is_refused(drive: Drive, group: int) -> None:
    message = encode(_message())
    good = struct.pack("<I", USERS.groups[1])
    assert message.count(good) == 1
    driver = drive()
    driver.go(message.replace(good, struct.pack("<I", group)))
    _assert_refused(driver)


def _assert_clean_end(launcher: Path, message: bytes, descriptors: int) -> None:
    driver = Driver(launcher)
    try:
        null = _null()
        driver.go(message, [null] * descriptors)
        os.close(null)
        code = driver.wait()
        lines = [line.split() for line in driver.record()]
        words = [words[0] for words in lines]
        if code == 1:
            assert words == ["failed"]
            assert lines[0][1] == "message"
        else:
            assert code == 0
            assert words in (["failed"], ["started", "failed"], ["started", "ended"])
        assert b"Sanitizer" not in driver.output()
    finally:
        driver.close()


HOSTILE = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
INTERESTING = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 2**16, 2**18, 2**23, 2**29, 2**30, 2**31 - 1, 2**31]),
    st.integers(0, 64),
    st.integers(2**32 - 64, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@HOSTILE
@given(message=st.binary(max_size=300), descriptors=st.integers(0, 6))
def test_bytes_of_any_kind_end_cleanly(launcher: Path, message: bytes, descriptors: int) -> None:
    _assert_clean_end(launcher, message, descriptors)


@HOSTILE
@given(
    changes=st.dictionaries(st.sampled_from(HEADER_FIELDS), INTERESTING, min_size=1, max_size=4),
    descriptors=st.integers(0, 6),
)
def test_headers_of_any_kind_end_cleanly(
    launcher: Path, changes: dict[str, int], descriptors: int
) -> None:
    _assert_clean_end(launcher, _fields(GOOD, **changes), descriptors)


@HOSTILE
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=8),
    length=st.integers(-8, 8),
    repaired=st.sampled_from(("total_bytes", "both", "none")),
)
def test_damaged_messages_end_cleanly(
    launcher: Path, edits: list[tuple[int, int]], length: int, repaired: str
) -> None:
    damaged = bytearray(GOOD)
    for at, value in edits:
        damaged[at] = value
    message = bytes(damaged[: len(damaged) + length]) + bytes(max(0, length))
    if repaired != "none":
        message = _fields(message, total_bytes=len(message))
    if repaired == "both":
        message = _fields(message, strings_bytes=max(0, STRINGS_BYTES + length))
    _assert_clean_end(launcher, message, 0)


# ---- Where it runs ----


@needs_root
def test_unprivileged_launcher_runs_its_task(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(_message("id -u; id -g; exit 3", users=None))
    assert driver.output().split() == [b"65534", b"65534"]
    assert driver.ended()[0] == 3 << 8


@needs_root
def test_unprivileged_launcher_terminates_its_task(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(_message("echo ready; exec sleep 60", users=None))
    driver.output_until(b"ready")
    assert int(_status(driver.pid)["CapPrm"], 16) == 0
    driver.terminate()
    assert driver.ended()[0] == signal.SIGTERM


@needs_root
def test_unprivileged_launcher_is_not_dumpable(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(_message("echo ready; exec sleep 60", users=None))
    driver.output_until(b"ready")
    assert os.stat(f"/proc/{driver.pid}/environ").st_uid == 0


@needs_root
def test_unprivileged_launcher_refuses_to_change_users(drive: Drive) -> None:
    driver = drive(wrapper=AS_NOBODY)
    driver.go(_message())
    _assert_refused(driver, errno.EPERM)


@needs_root
def test_unprivileged_launcher_cannot_raise_a_hard_limit(drive: Drive) -> None:
    driver = drive(wrapper=(*LIMITED, *AS_NOBODY))
    driver.go(_message(users=None, rlimits=((resource.RLIMIT_NOFILE, 30, 200),)))
    assert driver.failed() == (Step.RLIMIT, errno.EPERM)


@needs_root
def test_root_without_the_right_to_change_users_fails(drive: Drive) -> None:
    driver = drive(wrapper=("setpriv", "--bounding-set=-setuid,-setgid"))
    driver.go(_message("echo ran"))
    step, number = driver.failed()
    assert step in (Step.GROUPS, Step.GID)
    assert number == errno.EPERM
    assert driver.output() == b""


@needs_root
def test_root_that_cannot_empty_the_bounding_set_fails(drive: Drive) -> None:
    driver = drive(wrapper=("setpriv", "--bounding-set=-setpcap"))
    driver.go(_message("echo ran"))
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
    driver.go(_message("echo $$; kill -9 $$"))
    assert driver.output() == b"2\n"
    assert driver.ended()[0] == signal.SIGKILL
    assert driver.record()[0].startswith("started 2 ")


def test_init_of_a_pid_namespace_takes_sigterm_from_outside(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(_message("trap 'exit 8' TERM; echo ready; while :; do sleep 0.01; done"))
    driver.output_until(b"ready")
    (init,) = _children(driver.pid)
    os.kill(init, signal.SIGTERM)
    assert driver.ended()[0] == 8 << 8


def test_init_of_a_pid_namespace_reaps_orphans(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(
        _message(
            "i=0; while [ $i -lt 50 ]; do (true &); i=$((i+1)); done; echo ready; exec sleep 60"
        )
    )
    driver.output_until(b"ready")
    (init,) = _children(driver.pid)
    _until("the orphans to be reaped", lambda: len(_children(init)) == 1)


def test_init_of_a_pid_namespace_cannot_be_killed_from_within(drive_init: Drive) -> None:
    driver = drive_init()
    driver.go(_message("kill -9 1; kill -9 -1; exit 5", users=None))
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
            _until("the group to be empty", lambda: "populated 0" in _events(group))
            group.rmdir()


def _events(group: Path) -> str:
    return (group / "cgroup.events").read_text()


def test_task_is_born_in_its_cgroup_and_the_launcher_is_not(drive: Drive, cgroup: Path) -> None:
    directory = os.open(cgroup, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        driver = drive(cgroup_fd=directory)
    finally:
        os.close(directory)
    driver.go(_message("echo ready; exec sleep 60", flags=Flags.CGROUP))
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
    driver.go(_message(flags=Flags.CGROUP))
    step, number = driver.failed()
    assert step == Step.CLONE
    assert number in (errno.ENOENT, errno.ENODEV)


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
    driver = drive()
    driver.go(
        _message(f"echo ready; echo x > {target}", users=None, flags=Flags.LANDLOCK), [ruleset]
    )
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
    driver.go(_message("uname", filter=filter_program))
    assert os.strerror(errno.EDOM).encode() in driver.output()
    assert driver.ended()[0] == 1 << 8


# ---- The message's encoder ----


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ()},
        {"argv": (b"a\0b",)},
        {"environment": (b"A=\0",)},
        {"directory": b"/\0"},
        {"program": b"\0"},
        {"umask": 0o1000},
        {"umask": -1},
        {"filter": bytes(7)},
        {"filter": bytes(8 * 4097)},
        {"rlimits": ((0, 0, 0),) * 17},
        {"rlimits": ((0, -1, 0),)},
        {"rlimits": ((0, 2**64, 0),)},
        {"argv": (b"",) * (2**18 + 1)},
        {"environment": (b"x" * 9_000_000,)},
        {"users": dataclasses.replace(USERS, uid=0)},
        {"users": dataclasses.replace(USERS, init_gid=2**32 - 1)},
        {"users": dataclasses.replace(USERS, uid=USERS.init_uid)},
        {"users": dataclasses.replace(USERS, groups=(0,))},
        {"users": dataclasses.replace(USERS, groups=(1,) * 1025)},
    ],
)
def test_message_that_the_launcher_would_refuse_is_not_encoded(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot start a task"):
        encode(_message(**changes))


# ---- The program ----


def test_description_of_the_message_is_the_launchers(tmp_path: Path) -> None:
    constants = {
        "MESSAGE_MAGIC": launch_message.MAGIC,
        "MESSAGE_VERSION": launch_message.VERSION,
        "MESSAGE_MAX": launch_message.MESSAGE_MAX,
        "RLIMITS_MAX": launch_message.RLIMITS_MAX,
        "FILTER_MAX": launch_message.FILTER_MAX,
        "GROUPS_MAX": launch_message.GROUPS_MAX,
        "STRINGS_MAX": launch_message.STRINGS_MAX,
        "FD_CHANNEL": launch_message.FD_CHANNEL,
        "FD_MESSAGE": launch_message.FD_MESSAGE,
        "FD_CGROUP": launch_message.FD_CGROUP,
        "FD_FIRST_FREE": launch_message.FD_UID_LOCK + 1,
        "FLAGS_KNOWN": sum(Flags),
        "RLIM_INFINITY": launch_message.RLIM_INFINITY,
        "sizeof(struct header)": HEADER.size,
        "sizeof(struct wire_rlimit)": launch_message.RLIMIT.size,
        "sizeof(struct sock_filter)": launch_message.INSTRUCTION_BYTES,
        "offsetof(struct wire_rlimit, resource)": 0,
        "offsetof(struct wire_rlimit, soft)": 8,
        "offsetof(struct wire_rlimit, hard)": 16,
        **{f"FLAG_{flag.name}": flag.value for flag in Flags},
        **{f"offsetof(struct header, {name})": 4 * at for at, name in enumerate(HEADER_FIELDS)},
    }
    prints = "".join(f'printf("%llu\\n", (unsigned long long)({name}));\n' for name in constants)
    probe = tmp_path / "probe.c"
    probe.write_text(
        f'#define main launcher_main\n#include "{SOURCE}"\n#undef main\n'
        f"int main(void) {{ {prints}"
        "for (int i = 0; i < STEP_COUNT; i++) puts(step_names[i]); return 0; }\n"
    )
    _gcc("-std=c11", "-o", tmp_path / "probe", probe)
    lines = subprocess.check_output([tmp_path / "probe"], text=True).split()
    printed = dict(zip(constants, map(int, lines), strict=False))
    assert printed == constants
    assert lines[len(constants) :] == [str(step) for step in Step]


def test_launcher_compiles_without_a_warning(tmp_path: Path) -> None:
    _gcc(*WARNINGS, "-static", "-o", tmp_path / "launcher", SOURCE)


def test_launcher_is_short_enough_to_be_read() -> None:
    assert len(SOURCE.read_text().splitlines()) < 500


def test_installed_launcher_is_static() -> None:
    program = SOURCE.with_name("launcher").read_bytes()
    assert program[:6] == b"\x7fELF\x02\x01"
    offset, size, count = (
        struct.unpack_from("<Q", program, 32)[0],
        *struct.unpack_from("<HH", program, 54),
    )
    kinds = [struct.unpack_from("<I", program, offset + size * at)[0] for at in range(count)]
    interpreter, dynamic = 3, 2
    assert interpreter not in kinds
    assert dynamic not in kinds


def test_build_without_a_compiler_says_how_to_mend_it(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root = SOURCE.resolve().parents[1]
    if not (root / "setup.py").exists():
        pytest.skip("needs the source tree")
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", tmp_path, "-t", tmp_path],
        cwd=root,
        env={**os.environ, "CC": "/does/not/exist"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode != 0
    assert "apt install gcc" in built.stderr
