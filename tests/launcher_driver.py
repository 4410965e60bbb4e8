"""Drives the launcher as the spawner does: real sockets, memfds and processes.

A test module imports the two fixtures by name. Every test that uses them runs against the launcher
as installed and against one with ASan and UBSan, whose reports show as exit code 99.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stockade.sandbox import launch_message
from stockade.sandbox.launch_message import (
    GO,
    LaunchMessage,
    Users,
    encode,
)

DEADLINE_S = 30.0
SANITIZER_EXIT = 99
SOURCE = Path(launch_message.__file__).with_name("launcher.c")
ZYGOTE_SOURCE = SOURCE.with_name("zygote.c")
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


def compile_c(*arguments: str | Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = subprocess.run(
        [compiler, *map(str, arguments)], check=False, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr


@pytest.fixture(name="launcher", scope="session", params=["installed", "sanitized"])
def launcher_fixture(request: pytest.FixtureRequest) -> Iterator[Path]:
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
            compile_c(
                *WARNINGS, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                "-o", program, SOURCE, ZYGOTE_SOURCE, options,
            )  # fmt: skip
        program.chmod(0o755)
        yield program
    finally:
        shutil.rmtree(directory)


# ---- Driving ----


def until(what: str, condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
    return value


def wait_readable(fd: int, what: str) -> None:
    ready, _, _ = select.select([fd], [], [], DEADLINE_S)
    assert ready, f"waited in vain for {what}"


class Driver:
    """A waiting launcher and the spawner's ends of what it holds.

    Attributes:
        pid: the launcher's, or its wrapper's if that stays.
    """

    def __init__(
        self,
        program: Path,
        *,
        wrapper: Sequence[str] = (),
        cgroup_fd: int | None = None,
        message_fd: int | None = None,
        ruleset_fd: int | None = None,
        missing: int | None = None,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        self.memfd = os.memfd_create("message")
        self.output_reader, output = os.pipe()
        self.record_path = f"/proc/self/fd/{(record := os.memfd_create('record'))}"
        self._record = record
        null = os.open("/dev/null", os.O_RDWR)
        cgroup = null if cgroup_fd is None else cgroup_fd
        message = self.memfd if message_fd is None else message_fd
        # Numbers far above the fixed ones, so that no dup2 hits the source of a later one.
        sources = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)
            for fd in (
                null, output, output, theirs.fileno(), message, cgroup,
                null if ruleset_fd is None else ruleset_fd, self.output_reader, null,
            )
        ]  # fmt: skip
        command = [*wrapper, str(program)]
        self.pid = os.posix_spawn(
            shutil.which(command[0]) or command[0],
            command,
            {},
            file_actions=[
                (os.POSIX_SPAWN_CLOSE, number)
                if number == missing
                else (os.POSIX_SPAWN_DUP2, fd, number)
                for number, fd in enumerate(sources)
            ],
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
        wait_readable(self.channel.fileno(), "a packet")
        try:
            return self.channel.recv(100)
        except ConnectionResetError:  # it ended with one of our packets unread
            return b""

    def wait(self) -> int:
        """The launcher's exit code, negative for a signal."""
        wait_readable(self.pidfd, "the launcher's end")
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def record(self) -> list[str]:
        text = os.pread(self._record, 4096, 0).decode()
        assert not text or text.endswith("\n")
        return text.splitlines()

    def output_until(self, text: bytes) -> bytes:
        while text not in self._printed:
            wait_readable(self.output_reader, f"{text!r} in the output")
            read = os.read(self.output_reader, 65536)
            assert read, f"no {text!r} in {self._printed!r}"
            self._printed += read
        return self._printed

    def output(self) -> bytes:
        """Everything, after all who could print have let go of the pipe."""
        while True:
            wait_readable(self.output_reader, "the end of the output")
            if not (read := os.read(self.output_reader, 65536)):
                return self._printed
            self._printed += read

    def terminate(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def task_pid(self) -> int:
        started = until("the started line", self.record)[0].split()
        assert started[0] == launch_message.RECORD_STARTED
        return int(started[1])

    def ended(self) -> list[int]:
        """Waits for the end of a task that leaves nothing behind; the ended line's numbers."""
        assert self.said() == launch_message.SAYS_STARTED
        assert self.said() == launch_message.SAYS_ENDED
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

    def assert_refused(self, number: int = errno.EINVAL) -> None:
        """Waits for the end of a launcher that did not accept its packet or message."""
        assert self.wait() == 1
        assert self.record() == [f"failed message {number}"]
        assert self.output() == b""


Drive = Callable[..., Driver]


@pytest.fixture(name="drive")
def drive_fixture(launcher: Path) -> Iterator[Drive]:
    with contextlib.ExitStack() as stack:

        def start(**arguments: Any) -> Driver:
            driver = Driver(launcher, **arguments)
            stack.callback(driver.close)
            return driver

        yield start


def task_message(script: str = "exit 0", **changes: Any) -> LaunchMessage:
    message = LaunchMessage(
        program=b"/bin/sh",
        argv=(b"sh", b"-c", script.encode()),
        environment=(b"PATH=/usr/bin:/bin",),
        directory=b"/",
        users=USERS if IS_ROOT else None,
    )
    return dataclasses.replace(message, **changes)


def status_of(pid: int | str) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def open_null() -> int:
    return os.open("/dev/null", os.O_RDWR)
