"""Opening below a directory, and writing whole."""

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import threading

import pytest

from stockade.platform import clone, files
from stockade.platform.errors import SyscallError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("inside")
    (tmp_path / "outside").write_text("outside")
    fd = files.open_directory(tmp_path / "below")
    yield fd
    os.close(fd)


def test_a_file_below_opens_and_is_not_inherited(directory):
    fd = files.openat2(directory, b"file", os.O_RDONLY)
    try:
        assert os.read(fd, 100) == b"inside"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_file_is_made_with_its_mode(directory):
    fd = files.openat2(directory, "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("../outside", errno.EXDEV),
        ("/etc/passwd", errno.EXDEV),
        ("link", errno.ELOOP),
        ("link-directory/outside", errno.ELOOP),
        ("link-inside", errno.ELOOP),
        ("absent", errno.ENOENT),
    ],
)
def test_nothing_leads_out_of_the_directory(directory, path, number):
    os.symlink("/etc/passwd", "link", dir_fd=directory)
    os.symlink("..", "link-directory", dir_fd=directory)
    os.symlink("file", "link-inside", dir_fd=directory)
    with pytest.raises(SyscallError, match="openat2") as failed:
        files.openat2(directory, path, os.O_RDONLY)
    assert failed.value.errno == number


def test_a_magic_link_is_not_followed():
    proc = files.open_directory("/proc/self")
    try:
        with pytest.raises(SyscallError, match="ELOOP"):
            files.openat2(proc, "cwd", os.O_RDONLY)
    finally:
        os.close(proc)


def test_a_mount_point_is_not_crossed_when_asked():
    root = files.open_directory("/")
    try:
        with pytest.raises(SyscallError, match="EXDEV"):
            files.openat2(root, "proc/self", os.O_RDONLY, resolve=files.RESOLVE_NO_XDEV)
    finally:
        os.close(root)


def test_a_bad_flag_is_einval(directory):
    with pytest.raises(SyscallError, match="EINVAL"):
        files.openat2(directory, "file", 1 << 40)


def test_what_is_no_directory_is_enotdir(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SyscallError, match="ENOTDIR"):
        files.open_directory(tmp_path / "file")


@pytest.mark.parametrize("mode", [0o622, 0o600, 0o000])
def test_a_fifo_has_exactly_its_mode(directory, mode):
    old = os.umask(0o077)
    try:
        files.make_fifo_at(directory, b"fifo", mode)
    finally:
        os.umask(old)
    found = os.stat("fifo", dir_fd=directory)
    assert stat.S_ISFIFO(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == mode
    with pytest.raises(SyscallError, match="EEXIST"):
        files.make_fifo_at(directory, b"fifo", mode)


def test_the_mode_of_a_links_target_is_not_changed(directory):
    os.symlink("file", "link", dir_fd=directory)
    before = os.stat("file", dir_fd=directory).st_mode
    with pytest.raises(SyscallError, match=r"EOPNOTSUPP|ENOTSUP|ELOOP"):
        files.change_mode_at(directory, "link", 0o777)
    assert os.stat("file", dir_fd=directory).st_mode == before


def test_everything_is_written_through_a_full_pipe():
    read, write = os.pipe()
    content = os.urandom(500_000)
    received = bytearray()

    def reader():
        while part := os.read(read, 65536):
            received.extend(part)

    thread = threading.Thread(target=reader)
    thread.start()
    files.write_all(write, content)
    os.close(write)
    thread.join(20)
    os.close(read)
    assert received == content


def test_a_full_disk_is_told():
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(SyscallError, match="ENOSPC"):
            files.write_all(fd, b"x")
    finally:
        os.close(fd)


def test_writing_nothing_does_nothing():
    files.write_all(-1, b"")


def test_a_child_keeps_what_it_names_and_its_parent_sees_the_rest_closed():
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    pid, pidfd = clone.clone3(0)
    if pid == 0:
        try:
            files.close_all_but(write_end)
            os.write(write_end, b"+".join(name.encode() for name in os.listdir("/proc/self/fd")))
            signal.pause()
        finally:
            os._exit(1)
    try:
        theirs.close()
        ours.settimeout(30)
        assert ours.recv(1) == b""
        # The last is of the listing.
        assert len(os.read(read_end, 4096).split(b"+")) == 5
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        for fd in (read_end, write_end, pidfd):
            os.close(fd)


@needs_root
@pytest.mark.parametrize("attribute", ["i", "a"])
def test_a_protecting_attribute_is_taken_off(tmp_path, attribute):
    path = tmp_path / "file"
    path.touch()
    if subprocess.run(
        ["chattr", f"+{attribute}", path], check=False, capture_output=True
    ).returncode:
        pytest.skip("chattr cannot protect files here")
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            path.unlink()
        assert files.clear_immutable(fd)
        assert not files.clear_immutable(fd)
        path.unlink()
    finally:
        subprocess.run(["chattr", f"-{attribute}", path], check=False, capture_output=True)
        os.close(fd)


def test_a_file_system_without_attributes_has_none_set():
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        assert not files.clear_immutable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(fd)
