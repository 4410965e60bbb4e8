"""Landlock's calls on this kernel, each restriction in a process of its own."""

import errno
import os

import pytest
from perform_calls import create_ruleset
from python_process import run_python

from stockade.platform import landlock
from stockade.platform.landlock import AccessFs, AccessNet, Scope

ABI = landlock.abi()


def needs_abi(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(version > ABI, reason=f"needs Landlock ABI {version}, here is {ABI}")


PROLOGUE = """
import errno, os, socket, sys
from stockade.platform import landlock, prctl
from stockade.platform.landlock import *
from perform_calls import add_path_rule, create_ruleset, restrict_self
def error_of(call, *arguments):
    try:
        result = call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    if isinstance(result, int) and result > 2:
        os.close(result)
    return None
prctl.set_no_new_privs()
"""


def test_rights_of_the_kernels_abi_are_all_accepted_and_the_next_right_is_not():
    if ABI < 1:
        pytest.skip("no Landlock on this kernel")
    rights = landlock.rights_of(ABI)
    os.close(create_ruleset(rights.fs, rights.net, rights.scope))
    if ABI > landlock.NEWEST_ABI:
        pytest.skip(f"ABI {ABI} is newer than the table")
    for fs, net, scope in (
        (AccessFs(rights.fs + 1), rights.net, rights.scope),
        (rights.fs, AccessNet(rights.net + 1), rights.scope),
        (rights.fs, rights.net, Scope(rights.scope + 1)),
    ):
        with pytest.raises(OSError, match="landlock_create_ruleset") as caught:
            create_ruleset(fs, net, scope)
        # E2BIG: a field that the kernel does not have yet.
        assert caught.value.errno in (errno.EINVAL, errno.E2BIG)


def test_rights_only_grow_from_abi_to_abi():
    for version in range(1, landlock.NEWEST_ABI):
        older, newer = landlock.rights_of(version), landlock.rights_of(version + 1)
        assert older.fs & newer.fs == older.fs
        assert older.net & newer.net == older.net
        assert older.scope & newer.scope == older.scope
    assert landlock.rights_of(landlock.NEWEST_ABI).fs == AccessFs((1 << len(AccessFs)) - 1)
    assert landlock.rights_of(99) == landlock.rights_of(landlock.NEWEST_ABI)
    with pytest.raises(ValueError, match="first one is 1"):
        landlock.rights_of(0)


@needs_abi(1)
def test_only_what_a_rule_grants_is_allowed(tmp_path):
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    run_python(
        PROLOGUE
        + """
granted, denied = sys.argv[1:]
ruleset = create_ruleset(landlock.rights_of(1).fs)
directory = os.open(granted, os.O_PATH)
add_path_rule(ruleset, directory, AccessFs.READ_FILE | AccessFs.READ_DIR)
restrict_self(ruleset)
assert error_of(os.open, granted + "/file", os.O_RDONLY) is None
assert error_of(os.open, granted + "/file", os.O_WRONLY) == "EACCES"
assert error_of(os.open, denied + "/file", os.O_RDONLY) == "EACCES"
assert error_of(os.mkdir, granted + "/new") == "EACCES"
""",
        str(tmp_path / "open"),
        str(tmp_path / "closed"),
    )


@needs_abi(6)
def test_scopes_keep_signals_and_abstract_sockets_within():
    run_python(
        PROLOGUE
        + """
outside = socket.socket(socket.AF_UNIX)
outside.bind("")
outside.listen()
ruleset = create_ruleset(AccessFs(0), scoped=Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET)
restrict_self(ruleset)
def connect(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
assert error_of(connect, outside.getsockname()) == "EPERM"
assert error_of(os.kill, os.getppid(), 0) == "EPERM"
assert error_of(os.kill, os.getpid(), 0) is None
with socket.socket(socket.AF_UNIX) as inside:
    inside.bind("")
    inside.listen()
    assert error_of(connect, inside.getsockname()) is None
outside.close()
"""
    )


@needs_abi(1)
def test_rule_with_rights_that_are_not_handled_is_refused(tmp_path):
    run_python(
        PROLOGUE
        + """
ruleset = create_ruleset(AccessFs.READ_FILE)
directory = os.open(sys.argv[1], os.O_PATH)
assert error_of(add_path_rule, ruleset, directory, AccessFs.WRITE_FILE) == "EINVAL"
assert error_of(add_path_rule, ruleset, directory, AccessFs(0)) == "ENOMSG"
file = os.open(sys.argv[1] + "/file", os.O_CREAT | os.O_RDWR)
every = create_ruleset(landlock.rights_of(1).fs)
for right in landlock.rights_of(1).fs:
    expected = None if right & landlock.FILE_RIGHTS else "EINVAL"
    assert error_of(add_path_rule, every, file, right) == expected, right
""",
        str(tmp_path),
    )
