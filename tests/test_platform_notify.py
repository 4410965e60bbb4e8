"""Datagrams to a service manager, received by a socket as systemd has one."""

import errno
import socket
from pathlib import Path

import pytest

from stockade.platform.errors import SyscallError
from stockade.platform.notify import notify


def manager(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(address)
    listener.setblocking(False)
    return listener


def test_text_arrives_whole_at_a_path(tmp_path: Path) -> None:
    with manager(str(tmp_path / "notify")) as listener:
        notify(str(tmp_path / "notify"), "READY=1\nSTATUS=ü")
        assert listener.recv(4096) == "READY=1\nSTATUS=ü".encode()


def test_text_arrives_at_an_abstract_name(tmp_path: Path) -> None:
    with manager(f"\0{tmp_path}") as listener:
        notify(f"@{tmp_path}", "READY=1")
        assert listener.recv(4096) == b"READY=1"


def test_manager_that_reads_nothing_is_not_waited_for(tmp_path: Path) -> None:
    def say_much() -> None:
        for _ in range(100_000):
            notify(str(tmp_path / "notify"), "WATCHDOG=1")

    with manager(str(tmp_path / "notify")):
        with pytest.raises(SyscallError) as raised:
            say_much()
        assert raised.value.errno == errno.EAGAIN


def test_absent_manager_and_strange_addresses_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SyscallError) as raised:
        notify(str(tmp_path / "absent"), "READY=1")
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="neither a path"):
        notify("vsock:2:1", "READY=1")
