"""The hosts of the lab: what each is made from and how it is emulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

LAB: Final = Path(__file__).resolve().parent
CHECKOUT: Final = LAB.parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One kind of machine.

    Attributes:
        suite: Debian's code name.
        python: its Python, as ``3.11``; wheels are taken for this version.
        glibc_minor: its C library is 2.x; newer wheels are not taken.
        tcg_thread: ``multi`` or ``single``: how qemu emulates the processors.
    """

    name: str
    suite: str
    python: str
    glibc_minor: int
    tcg_thread: str


HOSTS: Final = {
    host.name: host
    for host in (
        # Kernel 6.1, systemd 252.
        Host("debian12", "bookworm", "3.11", 36, "multi"),
        # Kernel 6.12, systemd 257.
        Host("debian13", "trixie", "3.13", 41, "multi"),
    )
}


def read_list(path: Path) -> list[str]:
    """The lines of ``path`` without comments and empty ones."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
