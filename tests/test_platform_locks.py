from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stockade.platform import clone, pidfd
from stockade.platform.errors import SyscallError
from stockade.platform.locks import (
    lock_byte,
    lock_byte_as_process,
    processes_that_locked,
    unlock_byte,
    unlock_byte_as_process,
)


def test_byte_is_held_by_one_open_file_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    try:
        assert lock_byte(first, 1 << 40)
        assert not lock_byte(second, 1 << 40)
        assert lock_byte(second, (1 << 40) + 1)
        unlock_byte(first, 1 << 40)
        assert lock_byte(second, 1 << 40)
    finally:
        os.close(first)
        os.close(second)


def test_lock_lives_as_long_as_any_copy_of_the_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert lock_byte(first, 7)
    copy = os.dup(first)
    os.close(first)
    assert not lock_byte(second, 7)
    os.close(copy)
    assert lock_byte(second, 7)
    os.close(second)


def test_descriptor_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(SyscallError):
            lock_byte(fd, 0)
    finally:
        os.close(fd)


class Holder:
    """Another process that locks bytes as itself and holds them until it is killed."""

    def __init__(self, path: Path, *offsets: int) -> None:
        ready, said = os.pipe()
        self.pid, self._pidfd = clone.clone3(0)
        if self.pid == 0:
            try:
                fd = os.open(path, os.O_RDWR)
                assert all(lock_byte_as_process(fd, offset) for offset in offsets)
                os.write(said, b"x")
                signal.pause()
            finally:
                os._exit(0)
        os.close(said)
        assert os.read(ready, 1) == b"x"
        os.close(ready)

    def end(self) -> None:
        if self._pidfd >= 0:
            pidfd.send_signal(self._pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
            self._pidfd = -1


def test_process_that_holds_a_byte_is_told_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    first, second = Holder(path, 3, 7, 8), Holder(path, 4, 1 << 40)
    fd = os.open(path, os.O_RDWR)
    try:
        assert lock_byte_as_process(fd, 0)
        assert lock_byte_as_process(fd, 5)
        expected = {3: first.pid, 4: second.pid, 7: first.pid, 8: first.pid, 1 << 40: second.pid}
        assert processes_that_locked(fd, 0) == expected
        # Bytes that lie side by side are one lock for the kernel.
        assert processes_that_locked(fd, 8) == {8: first.pid, 1 << 40: second.pid}
        assert not lock_byte_as_process(fd, 3)
        first.end()
        assert processes_that_locked(fd, 0) == {4: second.pid, 1 << 40: second.pid}
        assert lock_byte_as_process(fd, 3)
    finally:
        for holder in (first, second):
            holder.end()
        os.close(fd)


def test_lock_of_a_process_is_not_its_childs_and_can_be_given_up(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    try:
        assert lock_byte_as_process(fd, 2)
        pid, child = clone.clone3(0)
        if pid == 0:
            os._exit(0 if processes_that_locked(fd, 0) == {2: os.getppid()} else 1)
        os.close(child)
        assert os.waitpid(pid, 0)[1] == 0
        unlock_byte_as_process(fd, 2)
        other = Holder(path, 2)
        assert processes_that_locked(fd, 0) == {2: other.pid}
        other.end()
    finally:
        os.close(fd)


def test_descriptor_that_is_not_open_is_an_error() -> None:
    for call in (lock_byte_as_process, unlock_byte_as_process, processes_that_locked):
        with pytest.raises(SyscallError, match="fcntl"):
            call(99_999, 0)
