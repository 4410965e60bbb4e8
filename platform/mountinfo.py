"""/proc/PID/mountinfo: what is mounted in a process' mount namespace.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from stockade.platform._libc import translated

_ESCAPE: Final = re.compile(rb"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """One mount.

    Attributes:
        mount_id: unique among those of the namespace that exist at one time.
        parent_id: of the mount that this one is mounted on.
        device: (major, minor) of its files.
        root: the directory of the file system that is its root; / but for a bind mount.
        target: where it is mounted, seen from the process' root.
        options: the mount's own, such as ro, nosuid.
        propagation: of ``shared:N``, ``master:N``, ``unbindable``; empty for a private one.
        kind: the file system's type.
        source: the device, or a name.
        super_options: those of the file system.
    """

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    root: str
    target: str
    options: frozenset[str]
    propagation: frozenset[str]
    kind: str
    source: str
    super_options: frozenset[str]


def read_mounts(pid: int | str = "self") -> list[Mount]:
    """Every mount below the process' root, in the order in which they were mounted on each other.

    A later one with the same target covers an earlier one. Names that are not UTF-8 carry
    surrogates, as ``os.fsdecode`` gives them.

    Raises:
        SyscallError: ENOENT, EACCES.
    """
    path = f"/proc/{pid}/mountinfo"
    with translated("read", path), open(path, "rb") as file:
        # Read whole: between two reads the kernel goes on at a mount that may be gone by then.
        content = file.read()
    # Not splitlines(): a carriage return in a name is not escaped.
    return [parse_line(line) for line in content.split(b"\n") if line]


def parse_line(line: bytes) -> Mount:
    """One line of the table.

    Raises:
        ValueError: it is not one.
    """
    before, separator, after = line.partition(b" - ")
    fields = before.split(b" ")
    # A name's spaces are escaped, so every space is between fields; a source may be empty.
    tail = after.split(b" ", 2)
    if not separator or len(fields) < 6 or len(tail) != 3:
        raise ValueError(f"cannot read a line of mountinfo: {line!r}")
    major, _, minor = fields[2].partition(b":")
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=(int(major), int(minor)),
        root=_unescape(fields[3]),
        target=_unescape(fields[4]),
        options=_options(fields[5]),
        propagation=frozenset(map(_unescape, fields[6:])),
        kind=_unescape(tail[0]),
        source=_unescape(tail[1]),
        super_options=_options(tail[2]),
    )


def _options(field: bytes) -> frozenset[str]:
    return frozenset(map(_unescape, field.split(b",")))


def _unescape(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field))
