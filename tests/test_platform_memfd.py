"""Sealed memfds: nobody changes what was sent."""

import fcntl
import mmap
import os

import pytest

from stockade.platform import memfd
from stockade.platform.errors import SyscallError


@pytest.fixture
def sealed():
    fd = memfd.sealed_memfd("test", b"content")
    yield fd
    os.close(fd)


def test_content_comes_back_whole_also_twice(sealed):
    assert memfd.read_sealed(sealed, 7) == b"content"
    assert memfd.read_sealed(sealed, 7) == b"content"
    assert not os.get_inheritable(sealed)


@pytest.mark.parametrize("size", [0, 5_000_000])
def test_nothing_and_megabytes_come_back(size):
    fd = memfd.sealed_memfd("test", b"x" * size)
    try:
        assert memfd.read_sealed(fd, size) == b"x" * size
    finally:
        os.close(fd)


def test_no_holder_can_change_it(sealed):
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"X", 0)
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"X", 7)
    with pytest.raises(PermissionError):
        os.ftruncate(sealed, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(sealed, 7)
    with pytest.raises(PermissionError):
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_more_than_the_limit_is_refused(sealed):
    with pytest.raises(ValueError, match="7 bytes, the limit is 6"):
        memfd.read_sealed(sealed, 6)


@pytest.mark.parametrize(
    "seals",
    [
        0,
        fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW,
    ],
)
def test_a_missing_seal_is_refused(seals):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"content")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(ValueError, match="not sealed"):
            memfd.read_sealed(fd, 100)
    finally:
        os.close(fd)


def test_what_is_no_memfd_is_refused(tmp_path):
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe = os.pipe()
    try:
        for fd in (ordinary, pipe[0]):
            with pytest.raises(ValueError, match=r"not a memfd|not sealed"):
                memfd.read_sealed(fd, 100)
    finally:
        for fd in (ordinary, *pipe):
            os.close(fd)


def test_a_name_that_is_too_long_is_einval():
    with pytest.raises(SyscallError, match="EINVAL"):
        memfd.sealed_memfd("n" * 250, b"")
