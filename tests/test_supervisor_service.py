"""What the service manager hears: from a worker that runs, and from its parts when it is deaf."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recording_scheduler import RecordingScheduler
from worker_process import WorkerProcess, eventually

from stockade.supervisor.service import Service


class Manager:
    """systemd's end: all that was said so far."""

    def __init__(self, place: Path) -> None:
        self.address = str(place / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.setblocking(False)
        # The worker may be another user by the time that it speaks.
        Path(self.address).chmod(0o666)
        self.said: list[str] = []

    def hears(self, line: str) -> bool:
        """Whether a line that matches was said by now."""
        while True:
            try:
                self.said += self.socket.recv(65536).decode().split("\n")
            except BlockingIOError:
                return any(re.fullmatch(line, each) for each in self.said)

    def forget(self) -> None:
        self.hears("")
        self.said.clear()


@pytest.fixture
def manager(place: Path) -> Iterator[Manager]:
    manager = Manager(place)
    yield manager
    manager.socket.close()


def test_worker_says_how_it_stands_and_feeds_the_watchdog(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess], manager: Manager
) -> None:
    worker = make_worker(
        environment={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "800000"},
    )
    eventually(lambda: manager.hears("READY=1"))
    eventually(lambda: manager.hears("STATUS=0 running, 0 queued, 0 undelivered"))
    scheduler.dispatch(worker.url, schedule_instance_id="t", payload="sleep 3000")
    eventually(lambda: manager.hears("STATUS=1 running, 0 queued, 0 undelivered"))
    manager.forget()
    eventually(lambda: manager.hears("WATCHDOG=1"))
    assert worker.process is not None
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: manager.hears("STOPPING=1"))
    manager.forget()
    # Again and again, for as long as it takes.
    eventually(lambda: manager.hears("EXTEND_TIMEOUT_USEC=60000000"))
    eventually(lambda: manager.hears("STATUS=stopping: 1 running, 0 queued, 0 undelivered"))
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    assert scheduler.terminal_report("t")["status"] == "cancelled"


def test_stopped_loop_feeds_no_watchdog(
    make_worker: Callable[..., WorkerProcess], manager: Manager
) -> None:
    worker = make_worker(
        environment={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"},
    )
    eventually(lambda: manager.hears("WATCHDOG=1"))
    assert worker.process is not None
    worker.process.send_signal(signal.SIGSTOP)
    try:
        # Both ends of a stop are seen: what was on its way is read, and then nothing comes.
        os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED | os.WNOWAIT)
        manager.forget()
        with pytest.raises(AssertionError, match="still False"):
            eventually(lambda: manager.hears("WATCHDOG=1"), 1.0)
    finally:
        worker.process.send_signal(signal.SIGCONT)
    eventually(lambda: manager.hears("WATCHDOG=1"))


def test_what_the_manager_does_not_take_is_said_again(manager: Manager) -> None:
    async def speak() -> None:
        service = Service({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "100000"})
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noisy:
            noisy.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    noisy.sendto(b"X=1", manager.address)
        service.reloading()
        manager.forget()
        rounds = asyncio.ensure_future(service.serve(lambda: "well"))
        while not manager.hears("READY=1"):
            await asyncio.sleep(0.01)
        rounds.cancel()

    asyncio.run(asyncio.wait_for(speak(), 30))
    # Nothing was lost, and all in order.
    assert [line for line in manager.said if line.endswith("ING=1") or line == "READY=1"] == [
        "RELOADING=1", "READY=1",
    ]  # fmt: skip
    assert manager.hears("STATUS=well")


def test_without_a_manager_nothing_is_said_and_nothing_runs() -> None:
    service = Service({})
    service.stopping()
    asyncio.run(asyncio.wait_for(service.serve(lambda: "never"), 30))
    assert not service.exists


def test_watchdog_of_another_process_is_not_ours_to_feed(manager: Manager) -> None:
    async def speak() -> None:
        service = Service(
            {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
        )
        rounds = asyncio.ensure_future(service.serve(lambda: "well"))
        while not manager.hears("STATUS=well"):
            await asyncio.sleep(0.01)
        rounds.cancel()

    asyncio.run(asyncio.wait_for(speak(), 30))
    assert not manager.hears("WATCHDOG=1")
