"""Session and user keyrings, in a user namespace of the test's own: its keyrings go with it."""

import os
import subprocess
import sys

import pytest

PROLOGUE = """
import ctypes, errno, os, sys
from stockade.platform import clone, keyring, namespaces, prctl, seccomp, syscalls, userns
from stockade.platform.errors import SyscallError
from stockade.platform.seccomp import *
numbers = syscalls.numbers(os.uname().machine)
call = ctypes.CDLL(None, use_errno=True).syscall
call.restype = ctypes.c_long
SETPERM, SEARCH, GET_ID = 5, 10, 0
SESSION, USER, USER_SESSION = -3, -4, -5
def add(name, ring):
    number = numbers["add_key"]
    return call(number, b"user", name, b"content", ctypes.c_size_t(7), ctypes.c_long(ring))
def search(name, ring):
    return call(numbers["keyctl"], SEARCH, ctypes.c_long(ring), b"user", name, ctypes.c_long(0))
def leave_only(rights, ring):
    serial = call(numbers["keyctl"], GET_ID, ctypes.c_long(ring), 0)
    assert call(numbers["keyctl"], SETPERM, ctypes.c_long(serial), ctypes.c_uint32(rights)) == 0
try:
    uid, gid = os.getuid(), os.getgid()
    namespaces.unshare(clone.CLONE_NEWUSER)
    userns.keep_own_ids(uid, gid)
except SyscallError as error:
    sys.exit(f"skip: no user namespace: {error}")
keyring.join_new_session()
if add(b"stockade-probe", SESSION) < 0:
    sys.exit(f"skip: no keyrings: {errno.errorcode[ctypes.get_errno()]}")
"""


def run_python(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.stderr.startswith("skip: "):
        pytest.skip(done.stderr.strip().removeprefix("skip: "))
    assert done.returncode == 0, done.stderr


def test_new_session_does_not_have_the_keys_of_the_old_one():
    run_python("""
assert search(b"stockade-probe", SESSION) > 0
keyring.join_new_session()
assert search(b"stockade-probe", SESSION) < 0
""")


def test_cleared_user_keyrings_have_no_key_left_for_the_next():
    run_python("""
for ring in (USER, USER_SESSION):
    assert add(b"stockade-secret", ring) > 0
keyring.join_new_session()
assert search(b"stockade-secret", USER) > 0  # it outlives the session: that is the problem
assert keyring.clear_user_keyrings()
for ring in (USER, USER_SESSION):
    assert search(b"stockade-secret", ring) < 0
    assert ctypes.get_errno() == errno.ENOKEY
assert keyring.clear_user_keyrings()
""")


def test_keyring_that_a_task_made_unclearable_is_told():
    run_python("""
assert add(b"stockade-secret", USER) > 0
VIEW, READ, SEARCH_RIGHT = 1, 2, 8
leave_only((VIEW | READ | SEARCH_RIGHT) << 24 | (VIEW | READ | SEARCH_RIGHT) << 16, USER)
keyring.join_new_session()
assert not keyring.clear_user_keyrings()
assert search(b"stockade-secret", USER) > 0
""")


def test_keyring_that_a_task_took_every_right_to_is_told():
    run_python("""
leave_only(0, USER_SESSION)
keyring.join_new_session()
assert not keyring.clear_user_keyrings()
""")


@pytest.mark.parametrize("function", ["join_new_session", "clear_user_keyrings"])
def test_errors_carry_the_call_and_a_kernel_or_filter_without_keyrings_is_no_error(function):
    run_python(f"""
def forbid(number):
    rules = (Rule("keyctl", fail_with(number)),)
    install(compile_filter(Policy(rules, ALLOW, ALLOW), os.uname().machine))
prctl.set_no_new_privs()
for absent in (errno.ENOSYS, errno.EPERM):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            forbid(absent)
            status = 0 if keyring.{function}() in (None, True) else 1
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
forbid(errno.EDQUOT)
try:
    keyring.{function}()
except SyscallError as error:
    assert (error.call, error.errno) == ("keyctl", errno.EDQUOT)
else:
    raise AssertionError
""")


FULL = """
import ctypes, errno, os, sys, time
from stockade.platform import keyring, syscalls
call = ctypes.CDLL(None, use_errno=True).syscall
number, size = syscalls.numbers(os.uname().machine)["add_key"], 16384
keyring.join_new_session()
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), 0)
ring = ctypes.c_long(keyring._persistent_keyring() or sys.exit("skip: no persistent keyrings"))
while size:
    if call(number, b"user", b"%d" % size, bytes(size), ctypes.c_size_t(size), ring) < 0:
        assert ctypes.get_errno() == errno.EDQUOT
    size //= 2
# What was cleared counts until the kernel has collected it.
end = time.monotonic() + 30
while not keyring.clear_user_keyrings():
    assert time.monotonic() < end
    time.sleep(0.05)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the quota of a uid of its own")
def test_keys_that_use_up_the_quota_of_their_uid_are_cleared_all_the_same():
    # One without keyrings yet.
    uid = 1870000000 + os.getpid()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(uid)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.stderr.startswith("skip: "):
        pytest.skip(done.stderr.strip().removeprefix("skip: "))
    assert done.returncode == 0, done.stderr
