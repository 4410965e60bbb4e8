"""System V objects in an ipc namespace of the test's own, and files by owner."""

import os

import pytest
import python_process

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PROLOGUE = """
import ctypes, errno, os
from stockade.platform import clone, ipc, namespaces
from stockade.platform.ipc import Kind, IpcObject
libc = ctypes.CDLL(None, use_errno=True)
namespaces.unshare(clone.CLONE_NEWIPC)
IPC_CREAT = 0o1000
def make_all():
    return {
        IpcObject(Kind.SHARED_MEMORY, libc.shmget(0, 4096, IPC_CREAT | 0o600)),
        IpcObject(Kind.SEMAPHORES, libc.semget(0, 3, IPC_CREAT | 0o600)),
        IpcObject(Kind.MESSAGES, libc.msgget(0, IPC_CREAT | 0o600)),
    }
def as_user(uid, body):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([]); os.setgid(uid); os.setuid(uid)
            body()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
"""


def run_python(script: str) -> str:
    return python_process.run_python(PROLOGUE + script)


@needs_root
def test_objects_of_one_uid_are_found_and_removed_and_others_stay():
    run_python("""
ours = make_all()
as_user(1879048001, make_all)
assert set(ipc.objects_of(0)) == ours
theirs = ipc.objects_of(1879048001)
assert {one.kind for one in theirs} == set(Kind)
assert all(ipc.remove(one) for one in theirs)
assert ipc.objects_of(1879048001) == []
assert not any(ipc.remove(one) for one in theirs)
assert set(ipc.objects_of(0)) == ours
""")


@needs_root
def test_object_given_away_is_still_found_by_its_maker():
    run_python("""
class Permissions(ctypes.Structure):
    _fields_ = [("key", ctypes.c_int), ("uid", ctypes.c_uint), ("gid", ctypes.c_uint),
                ("rest", ctypes.c_uint * 40)]
def give_away():
    number = libc.shmget(0, 4096, IPC_CREAT | 0o600)
    buffer = Permissions()
    assert libc.shmctl(number, 2, ctypes.byref(buffer)) == 0
    buffer.uid = 1879048002
    assert libc.shmctl(number, 1, ctypes.byref(buffer)) == 0
as_user(1879048001, give_away)
assert len(ipc.objects_of(1879048001)) == 1
assert ipc.objects_of(1879048001) == ipc.objects_of(1879048002)
assert ipc.remove(ipc.objects_of(1879048001)[0])
""")


@needs_root
def test_objects_of_others_are_not_ours_to_remove():
    run_python("""
ours = make_all()
def try_to_remove():
    for one in ours:
        try:
            ipc.remove(one)
        except OSError as error:
            assert error.errno == errno.EPERM
        else:
            raise AssertionError
as_user(1879048001, try_to_remove)
assert set(ipc.objects_of(0)) == ours
""")
