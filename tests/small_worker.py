"""A worker of a hundred lines that is not Stockade, over HTTP, good or with one fault of choice."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from recording_scheduler import post

from stockade.supervisor.wire.messages import (
    ACK_PATH,
    CANCEL_PATH,
    HEARTBEAT_PATH,
    REGISTER_PATH,
    REPORT_PATH,
)

FAULTS = (
    "no ack", "running last", "two ends", "camel case", "local time", "case matters",
    "null refused", "runs twice", "one at a time until answered", "never registers again",
    "no heartbeat after registration", "errors in running", "ignores cancel",
)  # fmt: skip


class SmallWorker:
    """Args: scheduler: its URL; fault: one of FAULTS, or empty for none."""

    def __init__(self, scheduler: str, fault: str = "") -> None:
        self._scheduler = scheduler
        self._fault = fault
        self._seen: dict[str, subprocess.Popen[str] | None] = {}
        self._cancelled: set[str] = set()
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._threads = [
            threading.Thread(target=self._server.serve_forever),
            threading.Thread(target=self._beat),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._server.shutdown()
        for process in list(self._seen.values()):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                cancel = self.path == CANCEL_PATH
                status, answer = worker._cancel(body) if cancel else worker._execute(body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        return Handler

    def _tell(self, path: str, **body: Any) -> int:
        try:
            return post(self._scheduler + path, {"worker_id": "small", **body})[0]
        except OSError:
            return 0

    def _beat(self) -> None:
        registered = False
        while not self._stop.is_set():
            if not registered:
                port = self._server.server_address[1]
                self._tell(
                    REGISTER_PATH, hostname="h", ip="127.0.0.1", grpc_addr="", protocol="http",
                    callback_url=f"http://127.0.0.1:{port}", max_concurrency=5, labels={},
                )  # fmt: skip
                registered = True
                if self._fault == "no heartbeat after registration":
                    registered = self._stop.wait(0.1)
                    continue
            beat = {"current_load": 0, "running_tasks": 0, "report_unix_milli": 1}
            if self._tell(HEARTBEAT_PATH, **beat) == 404:
                registered = self._fault == "never registers again"
            else:
                self._stop.wait(0.2)

    def _execute(self, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        key = body["schedule_instance_id"]
        task_type = str(body.get("task_type"))
        if self._fault == "null refused" and None in body.values():
            return 400, {"error": "null"}
        if key in self._seen and self._fault != "runs twice":
            return 202, {"status": "accepted"}
        self._seen[key] = None
        known = task_type if self._fault == "case matters" else task_type.strip().lower()
        thread = threading.Thread(target=self._run, args=(key, body["payload"], known))
        self._threads.append(thread)
        thread.start()
        return 202, {"status": "accepted"}

    def _cancel(self, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        process = self._seen.get(body["schedule_instance_id"])
        if process is None or process.poll() is not None:
            return 200, {"error": "unknown"}
        if self._fault != "ignores cancel":
            self._cancelled.add(body["schedule_instance_id"])
            os.killpg(process.pid, signal.SIGKILL)
        return 200, {"status": "cancelled"}

    def _run(self, key: str, payload: str, task_type: str) -> None:
        if self._fault == "one at a time until answered":
            with self._turn:
                self._live(key, payload, task_type)
        else:
            self._live(key, payload, task_type)

    def _live(self, key: str, payload: str, task_type: str) -> None:
        fault = self._fault
        name = "scheduleInstanceId" if fault == "camel case" else "schedule_instance_id"
        about: dict[str, Any] = {name: key, "error_code": "", "error_message": ""}
        if fault != "no ack":
            self._tell(ACK_PATH, schedule_instance_id=key)
        zone = None if fault == "local time" else datetime.UTC
        started_at = datetime.datetime.now(zone).isoformat()
        process = None
        if task_type == "shell":
            # Before it is told to run, since a cancel may follow at once.
            process = subprocess.Popen(
                ["bash", "-c", f"exec 2>&1; {payload}"],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._seen[key] = process
        running = {**about, "status": "running"}
        if fault == "errors in running":
            running["error_message"] = "so far so good"
        if fault != "running last":
            self._tell(REPORT_PATH, **running)
        output, code = "unknown type", 1
        if process is not None:
            output, code = process.communicate()[0], process.returncode
        status = "cancelled" if key in self._cancelled else "failed" if code else "success"
        end = {
            **about, "status": status, "error_message": output, "started_at": started_at,
            "finished_at": datetime.datetime.now(zone).isoformat(),
        }  # fmt: skip
        for _ in range(2 if fault == "two ends" else 1):
            self._tell(REPORT_PATH, **end)
        if fault == "running last":
            self._tell(REPORT_PATH, **running)
