"""What is mounted in this mount namespace, by the kernel's own table (proc_pid_mountinfo(5))."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """One mount; ``propagation`` is empty for a private one."""

    mount_id: int
    target: str
    options: frozenset[str]
    propagation: frozenset[str]
    kind: str
    source: str
    super_options: frozenset[str]


def read_mounts() -> list[Mount]:
    """Every mount below this process' root. No name in it may hold a space."""
    # Read whole: between two reads the kernel goes on at a mount that may be gone by then.
    return [_mount(line) for line in Path("/proc/self/mountinfo").read_text().split("\n") if line]


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields = before.split(" ")
    kind, source, super_options = after.split(" ", 2)
    return Mount(
        mount_id=int(fields[0]),
        target=fields[4],
        options=frozenset(fields[5].split(",")),
        propagation=frozenset(fields[6:]),
        kind=kind,
        source=source,
        super_options=frozenset(super_options.split(",")),
    )
