"""How much room a worker has, by its heartbeats and by what was sent since."""

from __future__ import annotations

import time

import pytest

from stockade.supervisor.scheduler.errors import NotFoundError
from stockade.supervisor.scheduler.workers import Presence, Worker, Workers
from stockade.supervisor.wire.messages import HeartbeatRequest, RegisterRequest


def registration(max_concurrency: int = 4) -> RegisterRequest:
    return RegisterRequest(
        worker_id="w1",
        hostname="lab",
        ip="127.0.0.1",
        callback_url="http://127.0.0.1:1",
        max_concurrency=max_concurrency,
    )


def heartbeat(load: int, running: int = 0, age_s: float = 0.0) -> HeartbeatRequest:
    return HeartbeatRequest(
        worker_id="w1",
        current_load=load,
        running_tasks=running,
        report_unix_milli=int((time.time() - age_s) * 1000),
    )


def fresh_worker(max_concurrency: int = 4) -> Worker:
    return Workers(offline_after_s=30.0).register(registration(max_concurrency), "http://here")


def test_what_was_sent_counts_before_the_next_heartbeat_does() -> None:
    worker = fresh_worker()
    for _ in range(3):
        worker.sent()
    assert worker.room == 1
    worker.ended()
    assert worker.room == 2


def test_the_load_is_the_larger_of_the_two_fields() -> None:
    worker = fresh_worker()
    worker.beat(heartbeat(load=1, running=3))
    assert worker.room == 1


def test_an_idle_worker_that_reports_full_load_gets_nothing() -> None:
    worker = fresh_worker()
    worker.beat(heartbeat(load=4, running=0))
    worker.ended()
    assert worker.room == 0


def test_a_worker_that_we_filled_is_filled_again_as_its_tasks_end() -> None:
    worker = fresh_worker()
    for _ in range(4):
        worker.sent()
    worker.beat(heartbeat(load=4, running=4))
    assert worker.room == 0
    worker.ended()
    worker.ended()
    assert worker.room == 1
    worker.sent()
    worker.beat(heartbeat(load=3, running=3))
    assert worker.room == 1


def test_a_busy_worker_that_drains_is_left_alone_once_a_task_of_it_has_ended() -> None:
    worker = fresh_worker()
    for _ in range(4):
        worker.sent()
    worker.beat(heartbeat(load=4, running=4))
    worker.beat(heartbeat(load=4, running=4))
    worker.ended()
    worker.beat(heartbeat(load=4, running=3))
    for _ in range(3):
        worker.ended()
        assert worker.room == 0
    worker.beat(heartbeat(load=4, running=0))
    assert worker.room == 0


def test_a_full_worker_of_one_task_gets_the_next_after_a_heartbeat() -> None:
    worker = fresh_worker(1)
    worker.sent()
    worker.beat(heartbeat(load=1, running=1))
    worker.ended()
    assert worker.room == 0
    worker.beat(heartbeat(load=0))
    assert worker.room == 1


def test_room_comes_back_with_a_heartbeat_below_the_maximum() -> None:
    worker = fresh_worker()
    worker.beat(heartbeat(load=4))
    worker.beat(heartbeat(load=0))
    assert worker.room == 4


@pytest.mark.parametrize("given", [0, -1])
def test_a_maximum_of_nothing_becomes_100(given: int) -> None:
    assert fresh_worker(given).maximum == 100


def test_a_worker_whose_heartbeat_is_too_old_is_offline_until_the_next_one() -> None:
    workers = Workers(offline_after_s=30.0)
    worker = workers.register(registration(), "http://here")
    worker.beat(heartbeat(load=0, age_s=29.0))
    workers.mark_offline()
    assert worker.presence is Presence.ONLINE
    worker.beat(heartbeat(load=0, age_s=31.0))
    workers.mark_offline()
    assert worker.presence is Presence.OFFLINE
    assert workers.rooms() == {}
    worker.beat(heartbeat(load=0))
    assert workers.rooms() == {"w1": 4}


def test_registering_again_keeps_the_load_and_takes_the_new_address() -> None:
    workers = Workers(offline_after_s=30.0)
    worker = workers.register(registration(), "http://here")
    worker.sent()
    assert workers.register(registration(2), "http://there") is worker
    assert (worker.room, worker.scheduler_url) == (1, "http://there")


def test_a_worker_that_never_registered_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="has not registered"):
        Workers(offline_after_s=30.0).find("w1")
