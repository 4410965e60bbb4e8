"""User namespaces: whether the caller may make and use one, and the ids inside it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final, NamedTuple, NoReturn

from stockade.platform import clone, mounts, prctl
from stockade.platform._libc import translated
from stockade.platform.errors import SyscallError

_REPORT_BYTES: Final = 4096
_ALL_WELL: Final = b"all well"


class IdRange(NamedTuple):
    """``length`` ids from ``inside`` on, which the parent namespace has from ``outside`` on.

    Ids that no range has show as the overflow id, 65534.
    """

    inside: int
    outside: int
    length: int = 1


def write_uid_map(pid: int | str, ranges: Iterable[IdRange]) -> None:
    """Gives a user namespace its uids; once only.

    Args:
        pid: a process in the namespace, from its parent namespace or itself; or ``self``.
        ranges: without CAP_SETUID in the parent namespace only one, of one id, the writer's own.

    Raises:
        SyscallError: EPERM (not allowed, or written before), EINVAL (ranges overlap), ENOENT.

    Source: user_namespaces(7).
    """
    _write(pid, "uid_map", _lines(ranges))


def write_gid_map(pid: int | str, ranges: Iterable[IdRange]) -> None:
    """Gives a user namespace its gids; as write_uid_map, and after deny_setgroups.

    With CAP_SETGID in the parent namespace setgroups need not be denied.

    Raises:
        SyscallError: as write_uid_map.
    """
    _write(pid, "gid_map", _lines(ranges))


def deny_setgroups(pid: int | str) -> None:
    """Forbids setgroups(2) in a user namespace, for good (Linux 3.19).

    Otherwise an ordinary user could drop a group that keeps it from a file.

    Raises:
        SyscallError: EPERM (the gids were written before), ENOENT.
    """
    _write(pid, "setgroups", "deny")


def keep_own_ids(uid: int, gid: int) -> None:
    """In a child made with CLONE_NEWUSER: it keeps its ids and has every capability inside.

    Makes it dumpable: of a process that is not, /proc/self belongs to root, the maps too.

    Args:
        uid: the effective one, as it was before the namespace.
        gid: the same.

    Raises:
        SyscallError: EPERM: the host does not let it.
    """
    prctl.allow_dump()
    deny_setgroups("self")
    write_uid_map("self", [IdRange(uid, uid)])
    write_gid_map("self", [IdRange(gid, gid)])


def obstacle() -> SyscallError | None:
    """What keeps the caller from using a new user namespace, found by trying; None when nothing.

    Trying is all that tells: there are several sysctls, limits and filters, and AppArmor on Ubuntu
    24.04 lets a namespace be made and then allows nothing in it. So a child in new user and mount
    namespaces maps its ids and changes its mounts.

    Call it from a single-threaded process. Nothing is left.
    """
    uid, gid = os.geteuid(), os.getegid()
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        pid, pidfd = clone.clone3(clone.CLONE_NEWUSER | clone.CLONE_NEWNS)
    except SyscallError as error:
        os.close(read_end)
        os.close(write_end)
        return error
    if pid == 0:
        _try_and_exit(uid, gid, write_end)
    os.close(write_end)
    try:
        # The child waits for nothing, so its end of the pipe is closed soon.
        report = os.read(read_end, _REPORT_BYTES)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(read_end)
        os.close(pidfd)
    if report == _ALL_WELL:
        return None
    call, _, rest = report.decode(errors="replace").partition("\0")
    arguments, _, number = rest.partition("\0")
    return SyscallError(call or "clone3", arguments, int(number or errno.EIO))


def _try_and_exit(uid: int, gid: int, report_fd: int) -> NoReturn:
    status = 1
    try:
        report = _ALL_WELL
        try:
            keep_own_ids(uid, gid)
            mounts.make_private("/")
        except SyscallError as error:
            report = f"{error.call}\0{error.arguments}\0{error.errno}".encode()
        os.write(report_fd, report[:_REPORT_BYTES])
        status = 0
    finally:
        os._exit(status)  # nothing may unwind into the parent's code


def _lines(ranges: Iterable[IdRange]) -> str:
    return "".join(f"{one.inside} {one.outside} {one.length}\n" for one in ranges)


def _write(pid: int | str, name: str, text: str) -> None:
    path = f"/proc/{pid}/{name}"
    with translated("write", path, text):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())  # in one write, or the kernel takes the first part only
        finally:
            os.close(fd)
