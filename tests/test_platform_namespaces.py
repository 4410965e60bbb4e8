"""Making and entering namespaces, loopback in a new network, and ids of user namespaces."""

import os
import subprocess
import sys

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
def test_namespace_lives_by_its_descriptor_and_can_be_entered():
    run_python("""
import os, socket
from stockade.platform import clone, namespaces
own = namespaces.open_namespace("self", "uts")
name = socket.gethostname()
namespaces.unshare(clone.CLONE_NEWUTS)
socket.sethostname("stockade-test")
new = namespaces.open_namespace(os.getpid(), "uts")
assert not os.get_inheritable(new)
namespaces.enter(own, clone.CLONE_NEWUTS)
assert socket.gethostname() == name
namespaces.enter(new, clone.CLONE_NEWUTS)
assert socket.gethostname() == "stockade-test"
""")


@needs_root
def test_mount_namespace_prepared_once_is_copied_for_each_child():
    run_python("""
import os
from stockade.platform import clone, mounts, mountinfo, namespaces
ready, tell = os.pipe()
done, finish = os.pipe()
pid, fd = clone.clone3(clone.CLONE_NEWNS)
if pid == 0:
    mounts.make_private("/")
    mounts.mount("prepared", "/mnt", "tmpfs", 0)
    os.write(tell, b"x")
    os.close(finish)
    os.read(done, 1)
    os._exit(0)
os.read(ready, 1)
prepared = namespaces.open_namespace(pid, "mnt")
os.close(finish)
os.waitpid(pid, 0)
for _ in range(3):
    pid, fd = clone.clone3(0)
    if pid == 0:
        namespaces.enter(prepared, clone.CLONE_NEWNS)
        namespaces.unshare(clone.CLONE_NEWNS)
        seen = [one.source for one in mountinfo.read_mounts() if one.target == "/mnt"]
        mounts.mount("own", "/mnt", "tmpfs", 0)
        os._exit(seen != ["prepared"])
    assert os.waitpid(pid, 0)[1] == 0
""")


@needs_root
def test_wrong_kind_and_no_descriptor_are_refused():
    run_python("""
import errno
from stockade.platform import clone, namespaces
from stockade.platform.errors import SyscallError
own = namespaces.open_namespace("self", "uts")
for fd, expected in ((own, errno.EINVAL), (9999, errno.EBADF)):
    try:
        namespaces.enter(fd, clone.CLONE_NEWNET)
    except SyscallError as error:
        assert (error.call, error.errno) == ("setns", expected)
    else:
        raise AssertionError
try:
    namespaces.unshare(1 << 30 | 1)
except SyscallError as error:
    assert (error.call, error.errno) == ("unshare", errno.EINVAL)
""")


@needs_root
def test_loopback_of_a_new_network_works_once_it_is_up():
    run_python("""
import socket
from stockade.platform import clone, namespaces, net
namespaces.unshare(clone.CLONE_NEWNET)
assert [name for _, name in socket.if_nameindex() if name == "lo"] == ["lo"]
assert not net.is_up()
net.bring_up()
net.bring_up()
assert net.is_up()
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


def test_loopback_of_the_host_is_left_up():
    assert run_python("from stockade.platform import net; print(net.is_up())") in (
        "True\n",
        "False\n",
    )
