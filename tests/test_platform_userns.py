"""User namespaces: the probe, and the ids inside."""

import os
import subprocess
import sys

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

AS_NOBODY = """
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_probe_agrees_with_what_an_ordinary_user_gets_and_leaves_nothing():
    printed = run_python(f"""
import os, subprocess
from stockade.platform import userns
{AS_NOBODY}
before = os.listdir("/proc/self/fd")
print(userns.obstacle())
assert os.listdir("/proc/self/fd") == before
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child left")
print(subprocess.run(["unshare", "-Urm", "true"], stderr=subprocess.DEVNULL).returncode == 0)
""")
    obstacle, children, allowed = printed.splitlines()
    assert children == "no child left"
    assert (obstacle == "None") == (allowed == "True")


@needs_root
def test_probe_names_the_call_that_is_forbidden():
    printed = run_python("""
import errno, os
from stockade.platform import prctl, seccomp, userns
from stockade.platform.seccomp import *
def forbid(call, number):
    pid = os.fork()
    if pid == 0:
        rules = (Rule(call, fail_with(number)),)
        install(compile_filter(Policy(rules, ALLOW, ALLOW), os.uname().machine))
        found = userns.obstacle()
        print(found.call, errno.errorcode[found.errno], flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
prctl.set_no_new_privs()
forbid("clone3", errno.ENOSYS)
forbid("mount_setattr", errno.EPERM)
""")
    assert printed == "clone3 ENOSYS\nmount_setattr EPERM\n"


def test_ordinary_user_maps_its_own_ids():
    printed = run_python(f"""
import os
from stockade.platform import clone, prctl, userns
{AS_NOBODY}
prctl.allow_dump()
if userns.obstacle():
    print("none")
    raise SystemExit
uid, gid = os.getuid(), os.getgid()
pid, fd = clone.clone3(clone.CLONE_NEWUSER)
if pid == 0:
    unmapped = os.getuid() == 65534 != 0
    userns.deny_setgroups("self")
    userns.write_uid_map("self", [userns.IdRange(0, uid)])
    userns.write_gid_map("self", [userns.IdRange(0, gid)])
    try:
        os.setgroups([])
    except PermissionError:
        os._exit((os.getuid(), os.getgid()) != (0, 0))
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
print("mapped")
""")
    if printed == "none\n":
        pytest.skip("no user namespaces for ordinary users on this host")
    assert printed == "mapped\n"


@needs_root
def test_parent_with_privileges_maps_ranges_of_a_child():
    run_python("""
import errno, os
from stockade.platform import clone, userns
from stockade.platform.errors import SyscallError
ready, tell = os.pipe()
pid, fd = clone.clone3(clone.CLONE_NEWUSER)
if pid == 0:
    os.read(ready, 1)
    os.setgroups([7])
    os.setgid(7)
    os.setuid(7)
    os._exit((os.getuid(), os.getgid(), os.getgroups()) != (7, 7, [7]))
ranges = [userns.IdRange(0, 100000, 5), userns.IdRange(5, 200000, 5)]
userns.write_uid_map(pid, ranges)
userns.write_gid_map(pid, ranges)
try:
    userns.write_uid_map(pid, ranges)
except SyscallError as error:
    assert error.errno == errno.EPERM
else:
    raise AssertionError
os.write(tell, b"x")
assert os.waitpid(pid, 0)[1] == 0
""")
