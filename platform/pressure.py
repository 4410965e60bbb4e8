"""Pressure stall information: how long work waited for a resource.

Source: Documentation/accounting/psi.rst; Linux 4.20 for the host, 5.2 for groups (cgroup v2).
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NamedTuple

from stockade.platform._libc import translated


class Stall(NamedTuple):
    """Waiting, as percent of the last 10, 60 and 300 seconds, and in all since the start."""

    avg10: float
    avg60: float
    avg300: float
    total_us: int


class Pressure(NamedTuple):
    """``some``: at least one task waited; ``full``: all that had work to do waited at once.

    The kernel tells no ``full`` of the CPU before 5.13; it is None then.
    """

    some: Stall
    full: Stall | None


def parse_pressure(text: str) -> Pressure:
    """What a pressure file says.

    Raises:
        ValueError: it is none.
    """
    stalls: dict[str, Stall] = {}
    for line in text.splitlines():
        kind, *words = line.split()
        table = dict(word.split("=", 1) for word in words)
        try:
            stalls[kind] = Stall(
                avg10=float(table["avg10"]),
                avg60=float(table["avg60"]),
                avg300=float(table["avg300"]),
                total_us=int(table["total"]),
            )
        except KeyError as error:
            raise ValueError(f"no pressure file: {line!r} has no {error}") from error
    if "some" not in stalls:
        raise ValueError(f"no pressure file: {text[:80]!r}")
    return Pressure(stalls["some"], stalls.get("full"))


def host_pressure(resource: str) -> Pressure | None:
    """The whole host's pressure on ``cpu``, ``io`` or ``memory``; None where it is not counted.

    Raises:
        SyscallError: it cannot be read for another reason.
    """
    path = f"/proc/pressure/{resource}"
    with translated("read", path):
        try:
            text = Path(path).read_text()
        except OSError as error:
            # EOPNOTSUPP: built in, but booted with psi=0.
            if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
                return None
            raise
    return parse_pressure(text)
