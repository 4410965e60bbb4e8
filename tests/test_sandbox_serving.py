"""The way into a spawner, on a host that has no room for who comes in."""

from __future__ import annotations

import os
import socket
import time

import pytest
from injection import Fault, attached, needs_strace
from spawner_client import SpawnerClient, eventually


@needs_strace
@pytest.mark.skipif(os.geteuid() != 0, reason="strace of a spawner needs root")
def test_supervisor_for_whom_no_descriptor_is_left_is_let_in_later_and_keeps_nobody_busy() -> None:
    client = SpawnerClient()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        late.settimeout(30.0)
        try:
            path = next((client.home / "run/spawner").glob("*.sock"))
            with attached(client.welcome.pid, Fault("accept4", 1, "EMFILE", times=60000)) as strace:
                late.connect(str(path))
                eventually(lambda: strace.fired)
                time.sleep(1.2)
                assert strace.calls()["accept4"] < 50
            late.send(b"no message")
            # Only who was let in is answered.
            assert b"cannot read a message" in late.recv(65536)
            assert client.run(1, "echo on")[1] == b"on\n"
        finally:
            client.close()
