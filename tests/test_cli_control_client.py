"""The command line's way to a worker, beside a real socket that a reload closes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.platform.errors import StockadeError
from stockade.supervisor.cli.control_client import ControlClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@contextlib.contextmanager
def reloaded_at_the_first_request(path: Path) -> Iterator[list[bytes]]:
    """A worker that closes the first connection without an answer; what the next ones asked."""
    asked: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()
            while True:
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(4096).split(b" ")[0])
                    connection.sendall(ANSWER)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join()


def test_question_that_a_reload_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with reloaded_at_the_first_request(path) as asked:
        assert ControlClient(path).get("/v1/status") == {}
        assert asked == [b"GET"]


def test_order_that_a_reload_cut_off_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with reloaded_at_the_first_request(path) as asked:
        with pytest.raises(StockadeError, match="cannot reach a worker"):
            ControlClient(path).post("/v1/drain", {})
        assert asked == []
