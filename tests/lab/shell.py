"""A console on a lab host, for people."""

from __future__ import annotations

import contextlib
import sys
import termios
from pathlib import Path
from typing import Final

from lab import disks, roots
from lab.hosts import Host
from lab.machine import Hardware, Machine
from lab.run import EXIT_GONE, say

# Ctrl-C goes to the guest; the monitor is on the same terminal (Ctrl-A C, and Ctrl-A X to end).
CONSOLE: Final = (
    "-chardev", "stdio,id=console,mux=on,signal=off",
    "-serial", "chardev:console", "-mon", "chardev=console",
)  # fmt: skip


def shell(host: Host, hardware: Hardware, disk_name: str | None, beside: tuple[Path, ...]) -> int:
    """Boots the host with its console on this terminal; returns when it was switched off."""
    image = roots.image(host)
    disk = None if disk_name is None else disks.named(host, image, disk_name)
    say(f"{host.name}: `poweroff` ends it, Ctrl-A X pulls the plug; the checkout is /srv/stockade")
    with (
        _terminal_as_it_was(),
        Machine(
            host, image, hardware=hardware, disk=disk, beside=beside,
            console_arguments=list(CONSOLE),
        ) as machine,
    ):  # fmt: skip
        machine.boot()
        say(f"{host.name}: the checkout is installed in /opt/stockade")
        machine.wait()
    return 0 if machine.hello else EXIT_GONE


@contextlib.contextmanager
def _terminal_as_it_was():  # type: ignore[no-untyped-def]
    # qemu puts the terminal in raw mode and, when killed, leaves it so.
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
