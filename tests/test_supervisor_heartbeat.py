from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recording_scheduler import Answer, Hang, Message, RecordingScheduler
from structlog.testing import capture_logs

from stockade.supervisor.backoff import backoff_s
from stockade.supervisor.config_load import load
from stockade.supervisor.heartbeat import Heartbeat, Load
from stockade.supervisor.links.http import HttpLink, credentials_for
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.outages import LineLimit, Outages
from stockade.supervisor.wire.messages import (
    HEARTBEAT_PATH,
    REGISTER_PATH,
    ExecuteRequest,
)


class NoIntake:
    async def execute(self, request: ExecuteRequest, link: str) -> None: ...

    async def cancel(self, instance_id: str) -> bool:
        return False


class Worker:
    """A worker that does nothing but register and beat."""

    def __init__(self, tmp_path: Path, scheduler: RecordingScheduler, **keys: object) -> None:
        overrides: dict[str, object] = {
            "worker.id": "w1",
            "worker.state_dir": str(tmp_path),
            "worker.runtime_dir": str(tmp_path),
            "worker.max_concurrency": 7,
            "worker.labels": {"zone": "a"},
            "http.listen": "127.0.0.1:0",
            "http.scheduler": scheduler.url,
            "http.heartbeat_interval": 0.05,
            "report.attempt_timeout": 0.3,
            "report.retry_min": 0.02,
        }
        overrides.update({key.replace("__", "."): value for key, value in keys.items()})
        config = load(None, {"HOME": str(tmp_path)}, overrides).config
        self.load = Load(current_load=3, running_tasks=2)
        self.link = HttpLink(
            config, NoIntake(), metrics=bytes, credentials=credentials_for(config), task_uids=None
        )
        self.heartbeat = Heartbeat(self.link, config, lambda: self.load, Outages())


def beating(
    tmp_path: Path,
    scheduler: RecordingScheduler,
    body: Callable[[Worker], Coroutine[Any, Any, None]],
    **keys: object,
) -> list[Any]:
    """Run ``body`` beside a heartbeat; gives the log."""

    async def run() -> None:
        worker = Worker(tmp_path, scheduler, **keys)
        await worker.link.start(open_listeners("127.0.0.1:0"))
        task = asyncio.create_task(worker.heartbeat.run())
        try:
            await body(worker)
            assert not task.done()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await worker.link.close()

    with capture_logs() as lines:
        asyncio.run(run())
    return list(lines)


async def seen(
    scheduler: RecordingScheduler, predicate: Callable[[RecordingScheduler], Any]
) -> Any:
    return await asyncio.to_thread(scheduler.wait_for, predicate)


def of(path: str) -> Callable[[RecordingScheduler], list[Message]]:
    return lambda scheduler: [m for m in scheduler.messages if m.path == path]


def at_least(path: str, count: int) -> Callable[[RecordingScheduler], bool]:
    return lambda scheduler: len(of(path)(scheduler)) >= count


def test_the_worker_registers_and_then_beats_at_once_and_again(tmp_path: Path) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(HEARTBEAT_PATH, 3))
        assert worker.heartbeat.registered
        assert worker.link.bound is not None
        assert scheduler.workers == [
            {
                "worker_id": "w1",
                "hostname": socket.gethostname(),
                "ip": "127.0.0.1",
                "callback_url": f"http://{worker.link.bound}",
                "grpc_addr": "",
                "protocol": "http",
                "max_concurrency": 7,
                "labels": {"zone": "a"},
            }
        ]

    with RecordingScheduler() as scheduler:
        lines = beating(tmp_path, scheduler, body)
        kinds = [message.kind for message in scheduler.messages]
        beat = scheduler.messages[1].body
    assert kinds[0] == "register"
    assert set(kinds[1:]) == {"heartbeat"}
    assert (beat["worker_id"], beat["current_load"], beat["running_tasks"]) == ("w1", 3, 2)
    assert abs(beat["report_unix_milli"] / 1000 - time.time()) < 60
    assert [line["event"] for line in lines] == ["registered"]


def test_the_first_beat_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(HEARTBEAT_PATH, 1))

    with RecordingScheduler() as scheduler:
        beating(tmp_path, scheduler, body, http__heartbeat_interval=3600)


def test_each_beat_tells_the_load_of_its_moment_and_a_hurried_one_comes_at_once(
    tmp_path: Path,
) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(HEARTBEAT_PATH, 1))
        worker.load = Load(current_load=7, running_tasks=1)
        worker.heartbeat.beat_now()
        await seen(scheduler, at_least(HEARTBEAT_PATH, 2))

    with RecordingScheduler() as scheduler:
        beating(tmp_path, scheduler, body, http__heartbeat_interval=3600)
        loads = [message.body["current_load"] for message in of(HEARTBEAT_PATH)(scheduler)]
    assert loads == [3, 7]


def test_a_beat_answered_404_registers_again_at_once(tmp_path: Path) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(HEARTBEAT_PATH, 1))
        scheduler.forget_workers()
        worker.heartbeat.beat_now()
        await seen(scheduler, at_least(HEARTBEAT_PATH, 3))

    with RecordingScheduler() as scheduler:
        lines = beating(tmp_path, scheduler, body, http__heartbeat_interval=3600)
        kinds = [message.kind for message in scheduler.messages]
    assert kinds == ["register", "heartbeat", "heartbeat", "register", "heartbeat"]
    events = [line["event"] for line in lines]
    assert events == ["registered", "scheduler has forgotten this worker", "registered"]


def test_a_scheduler_that_is_down_at_the_start_is_one_line_and_one_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def body(worker: Worker) -> None:
        scheduler.stop()
        worker.heartbeat.beat_now()
        # Down for many attempts, which leave no trace but in the log.
        await asyncio.to_thread(_attempts_refused, scheduler, 5)
        scheduler.start()
        count = len(scheduler.messages)
        await seen(scheduler, lambda s: len(s.messages) > count + 2)

    with RecordingScheduler() as scheduler:
        lines = beating(tmp_path, scheduler, body)
    outage = [line for line in lines if "outage" in line["event"]]
    assert [line["event"] for line in outage] == [
        "scheduler outage began",
        "scheduler outage ended",
    ]
    assert outage[0]["scheduler"] == scheduler.url
    assert outage[0]["reason"]
    assert outage[1]["outage_s"] >= 0


def _attempts_refused(scheduler: RecordingScheduler, count: int) -> None:
    """Return after so many connections were tried: by a listener that takes and drops them."""
    port = int(scheduler.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(10)
        for _ in range(count):
            listener.accept()[0].close()


def test_a_scheduler_that_never_answers_is_one_outage(tmp_path: Path) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(HEARTBEAT_PATH, 1))
        scheduler.misbehave(Hang())
        count = len(scheduler.messages)
        await seen(scheduler, lambda s: len(s.messages) > count + 2)
        scheduler.behave()
        count = len(scheduler.messages)
        await seen(scheduler, lambda s: len(s.messages) > count + 3)

    with RecordingScheduler() as scheduler:
        lines = beating(tmp_path, scheduler, body, report__attempt_timeout=0.1)
    events = [line["event"] for line in lines if "outage" in line["event"]]
    assert events == ["scheduler outage began", "scheduler outage ended"]


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_a_refused_registration_is_tried_again_with_pauses(tmp_path: Path, status: int) -> None:
    async def body(worker: Worker) -> None:
        scheduler.misbehave(Answer(status), path=REGISTER_PATH)
        scheduler.forget_workers()
        worker.heartbeat.beat_now()
        await seen(scheduler, at_least(REGISTER_PATH, 5))
        scheduler.behave()
        count = len(of(HEARTBEAT_PATH)(scheduler))
        await seen(scheduler, at_least(HEARTBEAT_PATH, count + 2))

    with RecordingScheduler() as scheduler:
        lines = beating(tmp_path, scheduler, body)
        times = [message.at for message in of(REGISTER_PATH)(scheduler)][1:5]
    assert all(later - earlier > 0.01 for earlier, later in pairwise(times))
    events = [line["event"] for line in lines if "outage" in line["event"]]
    assert events == ["scheduler outage began", "scheduler outage ended"]


def test_a_scheduler_that_takes_registrations_and_forgets_them_is_not_flooded(
    tmp_path: Path,
) -> None:
    async def body(worker: Worker) -> None:
        scheduler.misbehave(Answer(404), path=HEARTBEAT_PATH)
        await seen(scheduler, at_least(REGISTER_PATH, 6))

    with RecordingScheduler() as scheduler:
        beating(tmp_path, scheduler, body)
        times = [message.at for message in of(REGISTER_PATH)(scheduler)][2:]
    assert all(later - earlier > 0.01 for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    "header",
    [
        "Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
        "Mon, 99999999999999999999 Jan 2024 00:00:00 GMT",
        "9" * 4000,
        "soon",
    ],
)
def test_a_retry_after_that_is_no_time_ends_no_heartbeat(tmp_path: Path, header: str) -> None:
    async def body(worker: Worker) -> None:
        await seen(scheduler, at_least(REGISTER_PATH, 3))

    with RecordingScheduler() as scheduler:
        scheduler.misbehave(Answer(503, {}, {"Retry-After": header}))
        beating(tmp_path, scheduler, body)


def test_a_wall_clock_that_jumps_moves_no_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns

    async def beats(count: int) -> None:
        before = len(scheduler.messages)
        await seen(scheduler, lambda s: len(s.messages) >= before + count)

    async def body(worker: Worker) -> None:
        monkeypatch.setattr(time, "time_ns", lambda: real() + 3600 * 10**9)
        await beats(4)
        monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
        await beats(4)

    begun_at = time.monotonic()
    with RecordingScheduler() as scheduler:
        beating(tmp_path, scheduler, body)
        elapsed_s = time.monotonic() - begun_at
        assert len(of(HEARTBEAT_PATH)(scheduler)) <= elapsed_s / 0.05 + 2


def test_without_a_scheduler_nothing_is_sent(tmp_path: Path) -> None:
    async def run() -> None:
        config = load(
            None, {"HOME": str(tmp_path)}, {"worker.id": "w1", "worker.state_dir": str(tmp_path)}
        ).config
        link = HttpLink(
            config, NoIntake(), metrics=bytes, credentials=credentials_for(config), task_uids=None
        )
        heartbeat = Heartbeat(link, config, lambda: Load(0, 0), Outages())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await heartbeat.run()
        assert not heartbeat.registered

    with capture_logs() as lines:
        asyncio.run(run())
    assert lines == []


def test_waits_grow_to_their_bound_and_never_beyond() -> None:
    waits = [backoff_s(attempts, min_s=1, max_s=30) for attempts in range(1, 2000)]
    assert 0.8 <= waits[0] <= 1.2
    assert 1.6 <= waits[1] <= 2.4
    assert all(24 <= wait <= 30 for wait in waits[5:])
    assert len(set(waits[:5])) == 5


def test_one_outage_seen_by_two_is_told_once() -> None:
    outage = Outages().of("http://s")
    contacts: list[str] = []
    outage.on_contact(lambda: contacts.append("contact"))
    with capture_logs() as lines:
        outage.failed("heartbeat", "refused")
        outage.failed("reports", "refused")
        outage.failed("reports", "refused")
        assert [line["event"] for line in lines] == ["scheduler outage began"]
        outage.recovered("heartbeat")
        assert contacts == ["contact"]
        outage.recovered("reports")
        outage.recovered("reports")
    events = [line["event"] for line in lines]
    assert events == ["scheduler outage began", "scheduler outage ended"]


def test_held_back_lines_are_counted() -> None:
    limit = LineLimit(3600)
    assert [limit.allow() for _ in range(4)] == [0, None, None, None]
    quick = LineLimit(0)
    assert [quick.allow() for _ in range(3)] == [0, 0, 0]
