from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockade.platform.errors import SyscallError
from stockade.platform.locks import lock_byte, unlock_byte


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
