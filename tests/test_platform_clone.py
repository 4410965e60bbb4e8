"""clone3, in fresh single-threaded processes: what it is made for."""

import os

import pytest
from python_process import run_python

from stockade.platform import clone
from stockade.platform.cgroup import Group, find_mount
from stockade.platform.errors import SyscallError

# What container engines do to a call whose flags their filters cannot look at.
HIDE = """
import errno, os
from stockade.platform import prctl, seccomp
hide = seccomp.Policy(
    (seccomp.Rule("clone3", seccomp.fail_with(errno.ENOSYS)),), seccomp.ALLOW, seccomp.ALLOW
)
prctl.set_no_new_privs()
seccomp.install(seccomp.compile_filter(hide, os.uname().machine))
"""
with_and_without_clone3 = pytest.mark.parametrize("before", ["", HIDE], ids=["clone3", "clone"])
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@with_and_without_clone3
def test_child_runs_python_and_its_pidfd_tells_its_end(before):
    run_python(
        before
        + """
import os, select
from stockade.platform import clone, pidfd
pid, fd = clone.clone3(0)
if pid == 0:
    os._exit(0 if fd == -1 and os.getppid() > 1 else 9)
assert not os.get_inheritable(fd)
select.select([fd], [], [], 10)
ended = pidfd.reap(fd)
assert (ended.pid, ended.exit_code, ended.signal) == (pid, 0, None), ended
"""
    )


@with_and_without_clone3
def test_child_can_exec(before):
    printed = run_python(
        before
        + """
import os
from stockade.platform import clone
pid, fd = clone.clone3(0)
if pid == 0:
    os.execv("/bin/echo", ["echo", "from the child"])
os.waitpid(pid, 0)
"""
    )
    assert printed == "from the child\n"


@with_and_without_clone3
def test_handlers_of_the_parent_do_not_run_in_the_child(before):
    run_python(
        before
        + """
import os, select, signal
from stockade.platform import clone, pidfd
signal.signal(signal.SIGTERM, lambda *_: print("handler", flush=True))
ready, tell = os.pipe()
pid, fd = clone.clone3(0)
if pid == 0:
    os.write(tell, b"x")
    while True:
        signal.pause()
os.read(ready, 1)
pidfd.send_signal(fd, signal.SIGTERM)
select.select([fd], [], [], 10)
assert pidfd.reap(fd).signal == signal.SIGTERM
"""
    )


def test_five_hundred_children_in_a_row_leave_nothing():
    run_python("""
import os
from stockade.platform import clone
before = os.listdir("/proc/self/fd")
for number in range(500):
    pid, fd = clone.clone3(0)
    if pid == 0:
        os._exit(number % 256)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == number % 256
    os.close(fd)
assert os.listdir("/proc/self/fd") == before
""")


@needs_root
def test_child_is_pid_1_of_a_new_pid_namespace():
    run_python("""
import os
from stockade.platform import clone
pid, fd = clone.clone3(clone.CLONE_NEWPID | clone.CLONE_NEWNS | clone.CLONE_NEWIPC)
if pid == 0:
    os._exit(os.getpid())
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
""")


def test_sharing_flags_are_refused():
    clone_vm = 0x100
    with pytest.raises(ValueError, match="CLONE_NEW"):
        clone.clone3(clone_vm)


def test_failure_names_the_call_and_its_arguments():
    with pytest.raises(SyscallError, match=r"clone3\(.*cgroup=0x.*EBADF"):
        clone.clone3(0, cgroup_fd=1 << 20)


@needs_root
def test_child_starts_in_the_given_cgroup():
    mount = find_mount()
    if mount is None:
        pytest.skip("no cgroup v2 on this host")
    group = Group(mount / f"stockade-test-clone-{os.getpid()}")
    group.create()
    try:
        printed = run_python(
            """
import os, sys
from stockade.platform import cgroup, clone
group = cgroup.Group(sys.argv[1])
fd = group.open()
pid, pidfd = clone.clone3(0, cgroup_fd=fd)
if pid == 0:
    os.write(1, cgroup.own_group().encode())
    os._exit(0)
os.waitpid(pid, 0)
""",
            os.fsdecode(group.path),
        )
        assert printed.endswith(f"/stockade-test-clone-{os.getpid()}")
    finally:
        group.remove()
