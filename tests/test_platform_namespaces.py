"""Namespaces of a running process, and loopback in a new network."""

import os

import pytest
from python_process import run_python

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
def test_new_namespace_is_its_own():
    run_python("""
import os
from stockade.platform import clone, namespaces
before = os.readlink("/proc/self/ns/uts")
namespaces.unshare(clone.CLONE_NEWUTS)
assert os.readlink("/proc/self/ns/uts") != before == os.readlink(f"/proc/{os.getppid()}/ns/uts")
""")


def test_unknown_flag_is_refused():
    run_python("""
import errno
from stockade.platform import namespaces
from stockade.platform.errors import SyscallError
try:
    namespaces.unshare(1 << 30 | 1)
except SyscallError as error:
    assert (error.call, error.errno) == ("unshare", errno.EINVAL)
else:
    raise AssertionError
""")


@needs_root
def test_loopback_of_a_new_network_works_once_it_is_up():
    run_python("""
import errno, socket
from stockade.platform import clone, namespaces, net
def discard_port():
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", 9))
namespaces.unshare(clone.CLONE_NEWNET)
assert [name for _, name in socket.if_nameindex() if name == "lo"] == ["lo"]
assert discard_port() == errno.ENETUNREACH
net.bring_up()
net.bring_up()
assert discard_port() == errno.ECONNREFUSED
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        if family == socket.AF_INET6:
            continue  # a kernel without IPv6
        raise
    with server, socket.create_connection(server.getsockname()[:2], 5):
        pass
""")


def test_interface_that_does_not_exist_is_an_error():
    run_python("""
import errno
from stockade.platform import net
from stockade.platform.errors import SyscallError
try:
    net.bring_up("none0")
except SyscallError as error:
    assert error.errno == errno.ENODEV and "none0" in error.arguments
else:
    raise AssertionError
""")
