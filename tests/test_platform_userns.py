"""User namespaces: the ids inside."""

import pytest
from python_process import run_python


def test_ordinary_user_keeps_its_own_ids():
    script = """
import os
from stockade.platform import clone, userns
from stockade.platform.errors import SyscallError
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65533)
    os.setuid(65533)
uid, gid = os.getuid(), os.getgid()
try:
    pid, fd = clone.clone3(clone.CLONE_NEWUSER)
except SyscallError as error:
    print("skip", error)
    raise SystemExit
if pid == 0:
    unmapped = os.getuid() == 65534
    try:
        userns.keep_own_ids(uid, gid)
    except SyscallError as error:
        print("skip", error, flush=True)
        os._exit(0)
    try:
        os.setgroups([])
    except PermissionError:
        assert unmapped and (os.getuid(), os.getgid()) == (uid, gid)
        print("kept", flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    printed = run_python(script)
    if printed.startswith("skip"):
        pytest.skip(f"no user namespaces for ordinary users on this host: {printed}")
    assert printed == "kept\n"
