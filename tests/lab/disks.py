"""The disks that machines write to: overlays over a host's image, thrown away or kept by name."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lab.errors import LabError
from lab.hosts import Host
from lab.roots import Image, cache_directory


def make_overlay(image: Image, path: Path) -> None:
    """An empty overlay: reads come from the image, writes stay in ``path``."""
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    made = subprocess.run(
        [*command, str(image.disk.resolve()), str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise LabError(f"cannot make the disk {path}: {made.stderr.strip()}")


def named(host: Host, image: Image, name: str) -> Path:
    """The kept disk ``name`` of ``host``, made when it is not there.

    It belongs to one image: after a change that makes a new image it is a new disk.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise LabError(f"cannot name a disk {name!r}: letters, digits, - and _ only")
    disks = cache_directory() / "disks"
    disks.mkdir(parents=True, exist_ok=True)
    for path in disks.glob(f"{host.name}-*.qcow2"):
        key = path.name.removesuffix(".qcow2").rpartition(".")[2]
        if not (image.directory.parent / f"{host.name}-{key}").exists():
            # Its image was pruned; without it the overlay is nothing.
            path.unlink()
    key = image.directory.name.removeprefix(f"{host.name}-")
    path = disks / f"{host.name}-{name}.{key}.qcow2"
    if not path.exists():
        make_overlay(image, path)
    return path


@contextlib.contextmanager
def in_use(disk: Path, qemu_pid: int) -> Iterator[None]:
    """While it lasts, ``crash`` finds the machine that has the disk."""
    mark = disk.with_suffix(".pid")
    mark.write_text(str(qemu_pid))
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def crash(host: Host, name: str) -> int:
    """Pulls the plug of the machine that runs on the kept disk ``name``; how many were found.

    What the guest had not written to its disk is lost. Returns when the machine is gone.
    """
    found = 0
    for mark in (cache_directory() / "disks").glob(f"{host.name}-{name}.*.pid"):
        pid = int(mark.read_text())
        try:
            # First the descriptor, then the look: the pid cannot become another process between.
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if os.fsencode(mark.with_suffix(".qcow2")) not in command_line:
                continue
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [])
            found += 1
        finally:
            os.close(descriptor)
    return found
