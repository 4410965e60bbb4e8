"""User namespaces: the ids inside."""

from __future__ import annotations

import os

from stockade.platform import prctl
from stockade.platform._libc import translated


def keep_own_ids(uid: int, gid: int) -> None:
    """In a child made with CLONE_NEWUSER: it keeps its ids and has every capability inside.

    Makes it dumpable: of a process that is not, /proc/self belongs to root, the maps too. Others'
    ids show as the overflow id, 65534.

    Args:
        uid: the effective one, as it was before the namespace.
        gid: the same.

    Raises:
        SyscallError: EPERM: the host does not let it.

    Source: user_namespaces(7).
    """
    prctl.allow_dump()
    # Otherwise an ordinary user could drop a group that keeps it from a file (Linux 3.19).
    _write("setgroups", "deny")
    _write("uid_map", f"{uid} {uid} 1\n")
    _write("gid_map", f"{gid} {gid} 1\n")


def _write(name: str, text: str) -> None:
    path = f"/proc/self/{name}"
    with translated("write", path, text):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())  # in one write, or the kernel takes the first part only
        finally:
            os.close(fd)
