"""pidfds, and what the killing functions refuse."""

import os
import select
import signal
import subprocess
import sys

import pytest

from stockade.platform import pidfd
from stockade.platform.errors import SyscallError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield child
    child.kill()
    child.wait()


@pytest.fixture
def sleeper_fd(sleeper):
    fd = pidfd.open_pidfd(sleeper.pid)
    yield fd
    os.close(fd)


def wait_for_end(fd):
    assert select.select([fd], [], [], 10)[0], "still lives"


def test_pidfd_is_not_inherited(sleeper_fd):
    assert not os.get_inheritable(sleeper_fd)


def test_open_pidfd_of_nobody_is_esrch(sleeper):
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(SyscallError, match="ESRCH"):
        pidfd.open_pidfd(sleeper.pid)


def test_signal_ends_the_process_and_is_false_once_it_was_reaped(sleeper, sleeper_fd):
    assert pidfd.send_signal(sleeper_fd, signal.SIGTERM)
    wait_for_end(sleeper_fd)
    assert sleeper.wait() == -signal.SIGTERM
    assert not pidfd.send_signal(sleeper_fd, signal.SIGTERM)


def test_reap_tells_a_signal_only_after_the_end(sleeper, sleeper_fd):
    assert pidfd.reap(sleeper_fd) is None
    pidfd.send_signal(sleeper_fd, signal.SIGKILL)
    wait_for_end(sleeper_fd)
    ended = pidfd.reap(sleeper_fd)
    assert ended is not None
    assert (ended.pid, ended.exit_code, ended.signal) == (sleeper.pid, None, signal.SIGKILL)
    assert os.WTERMSIG(ended.wait_status) == signal.SIGKILL
    with pytest.raises(SyscallError, match="ECHILD"):
        pidfd.reap(sleeper_fd)


def test_reap_tells_an_exit_code():
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    fd = pidfd.open_pidfd(child.pid)
    try:
        wait_for_end(fd)
        ended = pidfd.reap(fd)
        assert ended is not None
        assert (ended.exit_code, ended.signal) == (7, None)
        assert os.waitstatus_to_exitcode(ended.wait_status) == 7
    finally:
        os.close(fd)
        child.wait()


def test_reap_of_what_is_not_our_child_is_echild():
    fd = pidfd.open_pidfd(os.getppid())
    try:
        with pytest.raises(SyscallError, match="ECHILD"):
            pidfd.reap(fd)
    finally:
        os.close(fd)


@pytest.fixture
def no_kernel(monkeypatch):
    """Fails when the kernel is asked: asking it would end this host."""

    def asked(*arguments):
        raise AssertionError(f"the kernel was asked to kill {arguments}")

    monkeypatch.setattr(os, "kill", asked)
    monkeypatch.setattr(os, "killpg", asked)


@pytest.mark.parametrize("pid", [0, 1, -1, -2, -(2**31)])
@pytest.mark.usefixtures("no_kernel")
def test_numbers_that_mean_many_processes_never_reach_the_kernel(pid):
    with pytest.raises(ValueError, match="cannot signal"):
        pidfd.checked_kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("no_kernel")
def test_we_are_never_signalled():
    with pytest.raises(ValueError, match="cannot signal"):
        pidfd.checked_kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("uid", [0, os.getuid() + 1])
@pytest.mark.usefixtures("no_kernel")
def test_everything_of_a_uid_is_killed_only_by_that_uid_alone_and_never_as_root(uid):
    with pytest.raises(ValueError, match="cannot kill everything"):
        pidfd.kill_everything_of_uid(uid)


def test_checked_kill_reaches_one_process(sleeper, sleeper_fd):
    assert pidfd.checked_kill(sleeper.pid, signal.SIGKILL)
    wait_for_end(sleeper_fd)
    sleeper.wait()
    assert not pidfd.checked_kill(sleeper.pid, signal.SIGKILL)


# All imports come first: the interpreter may lie where only root can read.
AS_NOBODY = """
import os, sys
from stockade.platform import pidfd
from stockade.platform.errors import SyscallError
uid = int(sys.argv[1])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
"""


@needs_root
def test_eperm_is_raised_and_not_taken_for_gone(sleeper):
    script = (
        AS_NOBODY
        + """
try:
    pidfd.checked_kill(int(sys.argv[2]), 9)
except SyscallError as error:
    assert "EPERM" in str(error)
else:
    raise SystemExit("no EPERM")
"""
    )
    subprocess.run(
        [sys.executable, "-c", script, str(free_uid()), str(sleeper.pid)], check=True, timeout=30
    )
    assert sleeper.poll() is None


@needs_root
def test_everything_of_a_uid_ends_and_others_live(sleeper):
    uid = free_uid()
    victim = subprocess.Popen(
        ["sh", "-c", "setsid sleep 60 & wait"], user=uid, group=uid, extra_groups=[]
    )
    script = AS_NOBODY + "pidfd.kill_everything_of_uid(uid)"
    try:
        subprocess.run([sys.executable, "-c", script, str(uid)], check=True, timeout=30)
        assert victim.wait(10) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()
    assert sleeper.poll() is None


def free_uid() -> int:
    """A uid that no other process has."""
    return 1_900_000_000 + os.getpid()


def test_end_of_a_process_is_seen_before_and_after_it_is_reaped() -> None:
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    fd = pidfd.open_pidfd(child)
    try:
        assert not pidfd.has_ended(fd)
        assert not pidfd.has_ended(fd, 0.01)
        os.kill(child, signal.SIGKILL)
        assert pidfd.has_ended(fd, None)
        os.waitpid(child, 0)
        assert pidfd.has_ended(fd)
    finally:
        os.close(fd)
