"""Seqpacket sockets on the real kernel: limits, truncation, credentials, long paths."""

import array
import os
import socket
import stat
import subprocess
import sys

import pytest

from stockade.platform import sockets
from stockade.platform.errors import SyscallError


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def null():
    fd = os.open("/dev/null", os.O_RDWR)
    yield fd
    os.close(fd)


def test_a_packet_is_one_message_with_its_descriptors(pair, null):
    ours, theirs = pair
    sockets.send_packet(ours, b"first", [null, null])
    sockets.send_packet(ours, b"second")
    packet, fds = sockets.receive_packet(theirs, 100, 2)
    try:
        assert (packet, len(fds)) == (b"first", 2)
        assert all(os.fstat(fd).st_rdev == os.fstat(null).st_rdev for fd in fds)
        assert not any(os.get_inheritable(fd) for fd in fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert sockets.receive_packet(theirs, 100, 2) == (b"second", [])


def test_the_end_reads_as_nothing(pair):
    ours, theirs = pair
    ours.close()
    assert sockets.receive_packet(theirs, 100, 2) == (b"", [])


def test_an_empty_packet_cannot_be_sent(pair):
    with pytest.raises(ValueError, match="empty packet"):
        sockets.send_packet(pair[0], b"")


def test_sending_to_a_peer_that_is_gone_is_epipe_and_no_signal(pair):
    ours, theirs = pair
    theirs.close()
    with pytest.raises(SyscallError, match="EPIPE"):
        sockets.send_packet(ours, b"x")


def test_a_full_socket_is_eagain(pair):
    ours, _ = pair
    ours.setblocking(False)
    with pytest.raises(SyscallError, match="EAGAIN"):  # noqa: PT012
        while True:
            sockets.send_packet(ours, b"x" * 1000)


def test_an_empty_socket_is_eagain(pair):
    pair[0].setblocking(False)
    with pytest.raises(SyscallError, match="EAGAIN"):
        sockets.receive_packet(pair[0], 10, 1)


def test_253_descriptors_pass_and_254_are_refused(pair, null):
    ours, theirs = pair
    sockets.send_packet(ours, b"x", [null] * 253)
    _, fds = sockets.receive_packet(theirs, 10, 253)
    for fd in fds:
        os.close(fd)
    assert len(fds) == 253
    with pytest.raises(ValueError, match="limit is 253"):
        sockets.send_packet(ours, b"x", [null] * 254)


def test_64_kib_pass(pair):
    ours, theirs = pair
    sockets.send_packet(ours, b"x" * 65536)
    assert sockets.receive_packet(theirs, 65536, 0) == (b"x" * 65536, [])


@pytest.mark.parametrize(
    ("packet_bytes", "descriptors", "allowed"),
    [(11, 1, 1), (1, 1, 0), (1, 2, 1), (1, 3, 2), (1, 4, 3)],
)
def test_more_than_is_allowed_is_an_error_and_its_descriptors_are_closed(
    pair, null, packet_bytes, descriptors, allowed
):
    ours, theirs = pair
    sockets.send_packet(ours, b"x" * packet_bytes, [null] * descriptors)
    before = open_fds()
    with pytest.raises(SyscallError, match="EMSGSIZE"):
        sockets.receive_packet(theirs, 10, allowed)
    assert open_fds() == before


def test_descriptors_in_two_control_messages_are_all_received(pair, null):
    ours, theirs = pair
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null]))
    ours.sendmsg([b"x"], [rights, rights])
    _, fds = sockets.receive_packet(theirs, 10, 2)
    for fd in fds:
        os.close(fd)
    assert len(fds) == 2


def test_credentials_of_a_pair_are_ours(pair):
    assert sockets.peer_credentials(pair[0]) == (os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_credentials_are_those_of_who_connected():
    # The last uid a process can have: read as a signed number it would be negative.
    uid = 2**32 - 2
    # Without a path: where the test's directory lies, another uid may not come.
    name = b"\0stockade-test-%d" % os.getpid()
    script = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "peer.connect('\\0' + sys.argv[1]); peer.recv(1)\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        listener.settimeout(20)
        child = subprocess.Popen([sys.executable, "-c", script, name[1:].decode()])
        try:
            connection, _ = listener.accept()
            with connection:
                assert sockets.peer_credentials(connection) == (child.pid, uid, uid)
            assert child.wait(20) == 0
        finally:
            child.kill()
            child.wait()


def test_the_sockets_mode_is_exact_whatever_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        with sockets.listen_seqpacket(tmp_path / "wide", 0o666):
            assert stat.S_IMODE((tmp_path / "wide").stat().st_mode) == 0o666
        os.umask(0)
        with sockets.listen_seqpacket(tmp_path / "narrow", 0o600):
            assert stat.S_IMODE((tmp_path / "narrow").stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_path_longer_than_an_address_works(tmp_path):
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    path = directory / "1.sock"
    assert len(bytes(path)) > sockets.MAX_PATH_BYTES
    before = open_fds()
    with sockets.listen_seqpacket(path, 0o600) as listener:
        assert stat.S_ISSOCK(path.stat().st_mode)
        with sockets.connect_seqpacket(path) as ours, listener.accept()[0] as theirs:
            sockets.send_packet(ours, b"through")
            assert sockets.receive_packet(theirs, 10, 0) == (b"through", [])
    assert open_fds() == before


def test_a_path_of_exactly_the_limit_and_one_more_work(tmp_path):
    for length in (sockets.MAX_PATH_BYTES, sockets.MAX_PATH_BYTES + 1):
        path = os.fsencode(tmp_path) + b"/"
        path += b"s" * (length - len(path))
        with sockets.listen_seqpacket(path, 0o600), sockets.connect_seqpacket(path):
            assert os.path.exists(path)


def test_a_name_that_is_too_long_even_so_is_enametoolong(tmp_path):
    with pytest.raises(SyscallError, match="ENAMETOOLONG"):
        sockets.connect_seqpacket(tmp_path / ("s" * 200))


def test_a_socket_that_exists_is_eaddrinuse_and_a_dead_one_refuses(tmp_path):
    path = tmp_path / "s"
    sockets.listen_seqpacket(path, 0o600).close()
    with pytest.raises(SyscallError, match="EADDRINUSE"):
        sockets.listen_seqpacket(path, 0o600)
    with pytest.raises(SyscallError, match="ECONNREFUSED"):
        sockets.connect_seqpacket(path)


def test_a_path_that_is_absent_is_enoent(tmp_path):
    with pytest.raises(SyscallError, match="ENOENT"):
        sockets.connect_seqpacket(tmp_path / "absent")
