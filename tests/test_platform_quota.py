"""Project quotas: what a kernel or file system without them answers; with them, test_lab_quota."""

import errno
import os

import pytest

from stockade.platform import quota
from stockade.platform.errors import SyscallError
from stockade.platform.quota import Project


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_file_is_in_no_project_until_it_is_given_one(fd):
    assert quota.project_of(fd) == Project(0, inherits=False)
    quota.set_project(fd, Project(0, inherits=False))
    assert quota.project_of(fd) == Project(0, inherits=False)


def test_file_system_without_quotas_is_told_by_its_error():
    fd = os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(SyscallError, match="quotactl_fd") as failed:
            quota.usage(fd, 1)
        assert failed.value.errno == errno.ENOSYS
        with pytest.raises(SyscallError):
            quota.set_limits(fd, 1, 1024, 1)
    finally:
        os.close(fd)


def test_file_without_attributes_is_told_by_its_error():
    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(SyscallError, match="FS_IOC_FSGETXATTR"):
            quota.project_of(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("size_bytes", "inodes"), [(0, None), (None, 0)])
def test_limit_of_nothing_is_refused_since_the_kernel_takes_it_for_none(fd, size_bytes, inodes):
    with pytest.raises(ValueError, match="0 for no limit"):
        quota.set_limits(fd, 1, size_bytes, inodes)
