"""Whose a TCP socket is: real connections over loopback, against /proc and fstat."""

import os
import socket
import subprocess
import sys

import pytest

from stockade.platform import sockdiag

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def ends(sock: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    return sock.getsockname()[:2], sock.getpeername()[:2]


def connected(host: str, family: socket.AddressFamily):
    """A listener, a client and the server's end of their connection."""
    listener = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listener.getsockname()[:2])
    return listener, client, listener.accept()[0]


@pytest.fixture(params=["127.0.0.1", "::1"])
def connection(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener, client, server = connected(request.param, family)
    except OSError as error:
        pytest.skip(f"no connection to {request.param}: {error}")
    with listener, client, server:
        yield client, server


def test_both_ends_of_a_connection_are_found(connection):
    for end in connection:
        owner = sockdiag.tcp_socket_owner(*ends(end))
        assert owner == (os.getuid(), os.fstat(end.fileno()).st_ino)


def test_a_listener_on_the_port_is_not_taken_for_the_connection(connection):
    _, server = connection
    host, port = server.getsockname()[:2]
    assert sockdiag.tcp_socket_owner((host, port), (host, 1)) is None


def test_a_socket_that_its_owner_closed_is_none(connection):
    client, server = connection
    local, remote = ends(client)
    client.close()
    # The end has arrived, so the client's socket is past it: half closed, and nobody's.
    assert server.recv(1) == b""
    assert sockdiag.tcp_socket_owner(local, remote) is None
    server.close()
    assert sockdiag.tcp_socket_owner(local, remote) is None


def test_ipv4_spoken_through_an_ipv6_socket_is_found_by_either_writing():
    try:
        listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError) as error:
        pytest.skip(f"no IPv6: {error}")
    with listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            with server:
                assert server.getpeername()[0] == "::ffff:127.0.0.1"
                for end in (client, server):
                    inode = os.fstat(end.fileno()).st_ino
                    (local, local_port), (remote, remote_port) = ends(end)
                    plain = [text.removeprefix("::ffff:") for text in (local, remote)]
                    for prefix in ("", "::ffff:"):
                        found = sockdiag.tcp_socket_owner(
                            (prefix + plain[0], local_port), (prefix + plain[1], remote_port)
                        )
                        assert found == (os.getuid(), inode)


@needs_root
def test_the_uid_is_that_of_who_made_the_socket():
    uid = 1_900_000_000 + os.getpid()
    # Without create_connection: it imports, and the interpreter may lie where only root can read.
    script = (
        f"import os, socket, sys; os.setresuid({uid}, {uid}, {uid}); s = socket.socket();"
        "s.connect(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = subprocess.Popen([sys.executable, "-c", script, str(listener.getsockname()[1])])
        try:
            listener.settimeout(20)
            server, peer = listener.accept()
            with server:
                owner = sockdiag.tcp_socket_owner(peer, server.getsockname())
                assert owner is not None
                assert owner[0] == uid
            assert child.wait(20) == 0
        finally:
            child.kill()
            child.wait()


@needs_root
def test_an_ordinary_user_may_ask():
    script = """
import os, socket
from stockade.platform import sockdiag
os.setresuid(1900000001, 1900000001, 1900000001)
listener = socket.create_server(("127.0.0.1", 0))
client = socket.socket()
client.connect(listener.getsockname())
assert sockdiag.tcp_socket_owner(client.getsockname(), client.getpeername())[0] == 1900000001
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_no_descriptor_stays_open(connection):
    client, _ = connection
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        sockdiag.tcp_socket_owner(*ends(client))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("local", "remote"),
    [
        (("localhost", 1), ("127.0.0.1", 2)),
        (("127.0.0.1", 1), ("::1", 2)),
        (("127.0.0.1", 65536), ("127.0.0.1", 2)),
        (("127.0.0.1", -1), ("127.0.0.1", 2)),
        (("fe80::1%nosuchinterface", 1), ("fe80::1", 2)),
    ],
)
def test_what_is_no_pair_of_ends_is_refused(local, remote):
    with pytest.raises(ValueError, match=r"cannot look up|does not appear to be"):
        sockdiag.tcp_socket_owner(local, remote)


def test_nobody_is_none():
    assert sockdiag.tcp_socket_owner(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert sockdiag.tcp_socket_owner(("fe80::1%lo", 1), ("fe80::1%1", 2)) is None
