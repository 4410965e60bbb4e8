"""Pressure stall information: how long work waited for a resource.

Source: Documentation/accounting/psi.rst; Linux 4.20 for the host, 5.2 for groups (cgroup v2).
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final, NamedTuple

from stockade.platform._libc import translated

_AVERAGE: Final = r"=(\d+\.\d+)"
_LINE: Final = re.compile(
    rf"^(some|full) avg10{_AVERAGE} avg60{_AVERAGE} avg300{_AVERAGE} total=(\d+)$", re.MULTILINE
)


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
    stalls = {
        kind: Stall(float(avg10), float(avg60), float(avg300), int(total_us))
        for kind, avg10, avg60, avg300, total_us in _LINE.findall(text)
    }
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
