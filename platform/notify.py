"""What a service says to its manager: one datagram of ``NAME=VALUE`` lines.

Source: sd_notify(3), and "NOTIFY_SOCKET" and "WATCHDOG_USEC" in systemd.exec(5).
"""

from __future__ import annotations

import socket

from stockade.platform._libc import translated


def notify(address: str, text: str) -> None:
    """Sends ``text`` to the manager that listens at ``address``; never waits.

    Args:
        address: NOTIFY_SOCKET's value: a path, or an abstract name after ``@``.
        text: lines such as ``READY=1``.

    Raises:
        ValueError: the address is neither.
        SyscallError: EAGAIN when the manager has too much to read just now; ENOENT, ECONNREFUSED
            when there is none.
    """
    if not address.startswith(("/", "@")):
        raise ValueError(f"cannot notify {address!r}: neither a path nor an abstract name")
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with translated("sendto", address):
            sender.sendto(text.encode(), socket.MSG_NOSIGNAL, name)
