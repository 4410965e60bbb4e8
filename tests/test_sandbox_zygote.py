"""The zygote: its launchers start where it stands, and a step that fails is told."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_driver import ZYGOTE_SOURCE
from spawner_client import eventually

from stockade.platform import clone, memfd, proc
from stockade.platform.errors import SyscallError
from stockade.sandbox import zygote_message
from stockade.sandbox.launch_message import FD_CHANNEL
from stockade.sandbox.oom_score import of_tasks
from stockade.sandbox.system_steps import Keep
from stockade.sandbox.zygote import Ground, Zygote, ZygoteLostError, Zygotes
from stockade.sandbox.zygote_message import FD_PASSED, Call, encode_program

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes namespaces")
AS_ROOT = os.geteuid() == 0


class Copy:
    """A launcher of a zygote, and the spawner's end of its channel."""

    def __init__(self, zygote: Zygote, calls: list[Call], flags: int = 0) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(60)
        null = os.open("/dev/null", os.O_RDWR)
        program = memfd.sealed_memfd("program", encode_program(calls))
        table = [null] * FD_PASSED
        table[FD_CHANNEL] = theirs.fileno()
        try:
            self.pid, self.pidfd = zygote.make(flags, None, program, table)
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
            os.close(null)
            os.close(program)

    def end(self) -> tuple[bytes, int]:
        """What it said, and its exit status, after it was told that no task comes."""
        self.channel.shutdown(socket.SHUT_WR)
        said = self.channel.recv(100)
        result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert result is not None
        self.channel.close()
        os.close(self.pidfd)
        return said, result.si_status


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    made = Zygote(Ground((), AS_ROOT, "/", of_tasks()))
    yield made
    made.close(wait=True)


def test_launcher_is_our_child_in_a_session_of_its_own(zygote: Zygote) -> None:
    copy = Copy(zygote, [])
    found = proc.process(copy.pid)
    assert found is not None
    assert found.parent == os.getpid()
    eventually(lambda: os.getsid(copy.pid) == copy.pid)
    name = Path(f"/proc/{copy.pid}/cmdline")
    eventually(lambda: name.read_bytes() == b"stockade-launcher\0")
    assert copy.end() == (b"", 0)


def test_call_that_fails_is_told_with_its_number_and_ends_the_copy(zygote: Zygote) -> None:
    calls = [
        Call("chdir", ("/nonexistent",), tolerated=(errno.ENOENT,)),
        Call("chdir", ("/nonexistent",), tolerated=(errno.EPERM, errno.ENOENT)),
        Call("chdir", ("/nonexistent",)),
    ]
    assert Copy(zygote, calls).end() == (f"!2 {errno.ENOENT}".encode(), 1)
    assert Copy(zygote, calls[:2]).end() == (b"", 0)


@needs_root
def test_namespaces_are_those_asked_for(zygote: Zygote) -> None:
    copy = Copy(zygote, [], clone.CLONE_NEWPID | clone.CLONE_NEWNET)
    for kind, differs in (("pid", True), ("net", True), ("mnt", False)):
        namespaces = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (copy.pid, "self")}
        assert len(namespaces) == 1 + differs
    assert copy.end() == (b"", 0)


def test_kernels_refusal_is_told_and_the_zygote_goes_on(zygote: Zygote) -> None:
    regular = os.open(__file__, os.O_RDONLY)
    program = memfd.sealed_memfd("program", encode_program([]))
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, regular)
        stack.callback(os.close, program)
        with pytest.raises(SyscallError, match=r"clone3\(.*EBADF"):
            zygote.make(0, regular, program, [regular] * FD_PASSED)
    assert Copy(zygote, []).end() == (b"", 0)


def test_launcher_whose_descriptor_finds_no_room_is_ended_and_told(zygote: Zygote) -> None:
    before = proc.children(os.getpid())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.dup(0)]
    try:
        while taken[-1] < highest:
            taken.append(os.dup(0))
        # As many as a copy opens before it asks: its channel's ends, /dev/null, the program.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 5, hard))
        with pytest.raises(SyscallError, match=r"recvmsg\(.*EMFILE"):
            Copy(zygote, [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert proc.children(os.getpid()) == before
    assert Copy(zygote, []).end() == (b"", 0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_zygote_that_is_gone_or_stopped_is_lost(end: signal.Signals) -> None:
    zygote = Zygote(Ground((), AS_ROOT, "/", of_tasks()))
    os.kill(zygote.pid, end)
    with pytest.raises(ZygoteLostError):
        Copy(zygote, [])
    zygote.close(wait=True)


def test_zygote_ends_when_we_hang_up() -> None:
    zygote = Zygote(Ground((), AS_ROOT, "/", of_tasks()))
    zygote._socket.close()
    os.waitid(os.P_PIDFD, zygote.pidfd, os.WEXITED)


@needs_root
def test_resolv_conf_that_is_away_for_a_while_stops_no_start_and_is_taken_up_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = Path(f"/run/stockade-test-{os.getpid()}")
    directory.mkdir()
    file = directory / "resolv.conf"
    file.write_text("nameserver 127.0.0.1\n")
    monkeypatch.setattr("stockade.sandbox.zygote.RESOLV_CONF", str(file))
    zygotes = Zygotes(as_root=True, work_path="/", oom_score_adj=of_tasks())
    try:
        system = (Keep(str(file), writable=False),)
        first = zygotes.of(system)
        file.unlink()
        assert zygotes.of(system) is first
        file.write_text("nameserver 127.0.0.2\n")
        second = zygotes.of(system)
        assert second is not first
        assert zygotes.of(system) is second
    finally:
        zygotes.close()
        shutil.rmtree(directory)


def test_zygotes_are_made_of_the_launcher_that_there_was_at_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zygotes = Zygotes(as_root=AS_ROOT, work_path="/", oom_score_adj=of_tasks())
    try:
        # An upgrade removed it.
        monkeypatch.setattr("stockade.sandbox.zygote.LAUNCHER", tmp_path / "launcher")
        assert Copy(zygotes.of(()), []).end() == (b"", 0)
    finally:
        zygotes.close()


def test_no_signal_but_kill_ends_a_zygote(zygote: Zygote) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(zygote.pid, number)
    assert Copy(zygote, []).end() == (b"", 0)


def test_program_that_is_too_long_is_refused_before_it_is_sent() -> None:
    longest = Call("chdir", ("x" * 4000,))
    with pytest.raises(ValueError, match="300 steps"):
        encode_program([longest] * 300)


def test_description_of_the_messages_is_the_zygotes() -> None:
    source = ZYGOTE_SOURCE.read_text()

    def number(name: str) -> int:
        found = re.search(rf"{name} =? ?(\w+)( << \d+)?", source)
        assert found is not None, name
        return int(eval(found[1].rstrip("U") + (found[2] or "")))

    assert number("#define REQUEST_MAGIC") == zygote_message.MAGIC
    assert number("PROGRAM_MAX") == zygote_message.PROGRAM_MAX
    assert f"sizeof(struct request) == {zygote_message.REQUEST.size}" in source
    assert f"sizeof(struct program) == {zygote_message._PROGRAM.size}" in source
    assert f"sizeof(struct call) == {zygote_message._CALL.size}" in source
    assert number("DESCRIPTORS_MAX") > FD_PASSED + 2
