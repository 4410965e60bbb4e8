"""The command line's way to a running worker: HTTP over its control.sock."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from stockade.platform.errors import StockadeError
from stockade.supervisor.control_socket import NAME, control_address

TIMEOUT_S: Final = 30.0


class ControlClient:
    """Asks one worker.

    Args:
        path: its control.sock; None for the one in STOCKADE_WORKER_RUNTIME_DIR, or where a worker
            that is told of no other runtime_dir has it.
        timeout_s: how long an answer may take.
    """

    def __init__(self, path: Path | None, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path or _default_path()
        self._timeout_s = timeout_s

    def get(self, path: str, query: dict[str, str] | None = None) -> Any:
        """The JSON that a GET answers.

        Raises:
            StockadeError: no worker answers, or it says no.
        """
        _, body = self._ask("GET", path, query)
        return json.loads(body)

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        """The JSON that a POST answers.

        Raises:
            StockadeError: no worker answers, or it says no.
        """
        _, body = self._ask("POST", path, fields=fields)
        return json.loads(body)

    def output(self, instance_id: str, offset: int) -> tuple[bytes, int, int, bool, int]:
        """A piece of a task's output, and where it stands.

        Returns:
            The piece, the next offset, the bytes printed so far, whether the piece is the last that
            there will be, and how many bytes before it were cut.

        Raises:
            StockadeError: no worker answers, or it knows no such task.
        """
        query = {"id": instance_id, "offset": str(offset)}
        response, body = self._ask("GET", "/v1/output", query)
        return (
            body,
            int(response.headers["X-Next-Offset"]),
            int(response.headers["X-Total-Bytes"]),
            response.headers["X-Ended"] == "1",
            int(response.headers["X-Offset"]) - offset,
        )

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        fields: dict[str, Any] | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            body = None if fields is None else json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            # The shell's bytes that are not UTF-8 arrive here as lone surrogates.
            raise StockadeError(f"cannot {method} {path}: no id holds what is not UTF-8") from error
        try:
            try:
                response, content = self._exchange(method, target, body)
            except (BrokenPipeError, ConnectionResetError):
                # A worker that is just being reloaded closed it; the next life answers.
                if method != "GET":
                    raise
                response, content = self._exchange(method, target, body)
        except (OSError, http.client.HTTPException) as error:
            raise StockadeError(
                f"cannot reach a worker at {self._path}: "
                f"{getattr(error, 'strerror', None) or error}; is it running? "
                "(--socket, or STOCKADE_WORKER_RUNTIME_DIR, names another one)"
            ) from error
        if response.status >= http.client.BAD_REQUEST:
            raise StockadeError(f"cannot {method} {path}: {_reason(content)}")
        return response, content

    def _exchange(
        self, method: str, target: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with contextlib.closing(_UnixConnection(self._path, self._timeout_s)) as connection:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response, response.read()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        with control_address(self._path) as address:
            self.sock.connect(address)


def _default_path() -> Path:
    runtime_dir = os.environ.get("STOCKADE_WORKER_RUNTIME_DIR")
    if not runtime_dir:
        # Late: reading the whole configuration is for those who did not say where.
        from stockade.supervisor.config_defaults import host_defaults

        runtime_dir = str(host_defaults(os.environ)["worker.runtime_dir"]())
    return Path(runtime_dir) / NAME


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
