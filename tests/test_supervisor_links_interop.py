"""A whole worker beside gRPC's own client and server, which is what real schedulers use."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from link_lab import RecordingIntake, configured, make_link
from worker_process import WorkerProcess, eventually

from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.wire.messages import MAX_DISPATCH_BYTES

PEER = Path(__file__).with_name("grpcio_peer.py")


class Peer:
    """See grpcio_peer.py."""

    def __init__(self, **settings: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address: str = self._read()["address"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def execute(self, address: str, instance_id: str, payload: str, **fields: Any) -> Any:
        return self.do(
            "call",
            address=address,
            method="ExecuteTask",
            fields={
                "schedule_instance_id": instance_id,
                "task_type": "shell",
                "payload": payload,
                **fields,
            },
        )

    def messages(self, instance_id: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        return [
            (method, fields)
            for method, fields, _ in self.do("messages")["messages"]
            if instance_id in (None, fields.get("schedule_instance_id"))
        ]

    def ended(self, instance_id: str) -> dict[str, Any]:
        """The task's terminal report; waits for it."""
        return eventually(
            lambda: next(
                (
                    fields
                    for method, fields in self.messages(instance_id)
                    if method == "ReportTaskStatus" and fields["status"] != "running"
                ),
                {},
            )
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**settings: str) -> Peer:
        made.append(Peer(**settings))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def started(peer: Peer, scheduler: str, lines: str = "") -> WorkerProcess:
    worker = WorkerProcess(scheduler, link="grpc", lines=f"heartbeat_interval = 0.2\n{lines}")
    try:
        worker.start()
        eventually(lambda: [m for m, _ in peer.messages() if m == "Heartbeat"])
    except BaseException:
        worker.close()
        raise
    return worker


def test_a_worker_and_gRPCs_own_library_understand_each_other(  # noqa: N802
    make_peer: Callable[..., Peer],
) -> None:
    peer = make_peer()
    worker = started(peer, peer.address)
    try:
        methods = [method for method, _ in peer.messages()]
        assert methods[:2] == ["RegisterWorker", "Heartbeat"]
        registration = peer.messages()[0][1]
        address = registration["grpc_addr"]
        assert (address, registration["protocol"]) == (worker.listen("grpc"), "grpc")

        assert peer.execute(address, "a", "echo hi; exit 3") == {
            "answer": {"accepted": True, "message": ""}
        }
        report = peer.ended("a")
        assert (report["status"], report["exit_code"]) == ("failed", 3)
        assert report["error_message"].endswith("\nhi\n")
        assert [fields.get("status", method) for method, fields in peer.messages("a")] == [
            "AckTask", "running", "failed",
        ]  # fmt: skip

        # Bytes that are no UTF-8 went out as text, or the report could not have been read.
        peer.execute(address, "b", r"printf 'a\377\376b\n'")
        assert peer.ended("b")["error_message"] == "a\ufffd\ufffdb\n"

        peer.execute(address, "c", "sleep 60")
        eventually(lambda: len(peer.messages("c")) == 2)
        cancelled = peer.do(
            "call", address=address, method="CancelTask", fields={"schedule_instance_id": "c"}
        )
        assert cancelled == {"answer": {"ok": True}}
        assert peer.ended("c")["status"] == "cancelled"

        unknown = {"schedule_instance_id": "nobody"}
        answer = peer.do("call", address=address, method="CancelTask", fields=unknown)
        assert answer == {"answer": {"ok": False}}
        empty = peer.do("call", address=address, method="CancelTask", fields={})
        assert empty["status"] == "INVALID_ARGUMENT"
        assert peer.execute(address, "d", "a\0b")["status"] == "INVALID_ARGUMENT"
        large = peer.execute(address, "e", "#" * (MAX_DISPATCH_BYTES + 1))
        assert large["status"] == "RESOURCE_EXHAUSTED"
        peer.execute(address, "f", "echo $((1+1)) #" + "x" * 1_000_000)
        assert peer.ended("f")["error_message"] == "2\n"
    finally:
        worker.close()


def test_mutual_tls_and_a_token_work_with_gRPCs_own_library(  # noqa: N802
    make_peer: Callable[..., Peer], place: Path
) -> None:
    ours = Authority(place, "ours")
    scheduler = ours.issue("scheduler")
    cert, key = ours.issue("worker")
    (place / "token").write_text("s3cret\n")
    files = {"ca": str(ours.file), "cert": str(scheduler[0]), "key": str(scheduler[1])}
    peer = make_peer(**files, token="s3cret")
    stranger = make_peer(**files, token="wrong")
    worker = started(
        peer,
        f"https://{peer.address}",
        f"""
        tls_cert = "{cert}"
        tls_key = "{key}"
        tls_ca = "{ours.file}"
        tls_client_ca = "{ours.file}"
        token_file = "{place}/token"
        """,
    )
    try:
        address = peer.messages()[0][1]["grpc_addr"]
        peer.execute(address, "a", "echo secured")
        assert peer.ended("a")["error_message"] == "secured\n"
        for _, _, metadata in peer.do("messages")["messages"]:
            assert metadata["authorization"] == "Bearer s3cret"
        assert stranger.execute(address, "b", "true")["status"] == "UNAUTHENTICATED"
        plain = make_peer()
        assert plain.execute(address, "c", "true")["status"] == "UNAVAILABLE"
    finally:
        worker.close()


def test_tasks_start_while_grpc_is_busy_and_none_hangs(make_peer: Callable[..., Peer]) -> None:
    """STOCKADE_TEST_TASKS=10000 for as many as have made others' workers hang."""
    count = int(os.environ.get("STOCKADE_TEST_TASKS", "300"))
    peer = make_peer()
    busy = make_peer()
    worker = started(peer, peer.address)
    try:
        address = worker.listen("grpc")
        # Another caller's calls all the while: duplicates, which the worker answers and never runs.
        ended = threading.Event()

        def repeat() -> None:
            while not ended.is_set():
                assert busy.do("flood", address=address, count=50, in_flight=4) == {"failed": []}

        repeating = threading.Thread(target=repeat)
        repeating.start()
        try:
            flood = peer.do("flood", address=address, count=count, in_flight=16)
            assert flood == {"failed": []}
            eventually(lambda: len(peer.do("ends")["ends"]) == count, 60 + count / 5)
        finally:
            ended.set()
            repeating.join()
        eventually(lambda: worker.status()["undelivered_reports"] == 0)
        # A report whose answer came too late is told again, and says the same.
        assert {end for ends in peer.do("ends")["ends"].values() for end in ends} == {"success"}
    finally:
        worker.close()


def test_a_handover_of_the_listening_socket_refuses_no_dispatch(
    make_peer: Callable[..., Peer], tmp_path: Path
) -> None:
    """As a reload does it: one life ends while the next one serves on the same socket."""
    peer = make_peer()

    async def run() -> None:
        settings = configured("grpc", tmp_path)
        (listener,) = open_listeners("127.0.0.1:0", "grpc")
        port = listener.getsockname()[1]
        intakes = [RecordingIntake("grpc") for _ in range(5)]
        link = make_link("grpc", settings, intakes[0])
        await link.start([listener.dup()])
        flood = asyncio.create_task(
            asyncio.to_thread(
                peer.do, "flood", address=f"127.0.0.1:{port}", count=3000, in_flight=8
            )
        )
        for before, following in itertools.pairwise(intakes):
            while len(before.dispatches) < 100:
                await asyncio.sleep(0.01)
                assert not flood.done(), flood.result()
            successor = make_link("grpc", settings, following)
            await successor.start([listener.dup()])
            await link.close()
            link = successor
        assert (await flood)["failed"] == []
        await link.close()
        listener.close()
        taken = [
            request.schedule_instance_id for intake in intakes for request in intake.dispatches
        ]
        assert set(taken) == {f"flood-{number}" for number in range(3000)}

    asyncio.run(run())
