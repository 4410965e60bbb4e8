"""The scheduler's side of the protocol: a real process, real sockets, the worker played here."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scheduler_lab import (
    FakeWorker,
    SchedulerProcess,
    ended,
    fake_worker,
    get,
    play,
    post,
    scheduler_process,
    submit,
    until,
)


def test_a_task_goes_from_submission_to_success(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, payload="echo hi", timeout_seconds=7)
        dispatch = await worker.next_dispatch()
        assert dispatch == {
            "schedule_instance_id": task["instance_id"],
            "task_id": task["task_id"],
            "task_type": "shell",
            "payload": "echo hi",
            "image": "",
            "timeout_seconds": 7,
            "retry_count": 0,
            "shard_no": 0,
            "shard_total": 0,
            "idempotency_key": f"task-{task['task_id']}",
            "scheduler_url": scheduler.url,
        }
        ack = {"schedule_instance_id": task["instance_id"], "worker_id": "w1"}
        assert await worker.call("/api/v1/task-instances/ack", ack) == (200, {"status": "ok"})
        assert await worker.report(dispatch, "running") == 200
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks/{task['id']}")
        assert (shown["status"], shown["ended"], shown["worker_id"]) == ("running", False, "w1")
        times = {
            "started_at": "2025-01-01T00:00:00.123456789Z",
            "finished_at": "2025-01-01T00:00:01Z",
        }
        assert (
            await worker.report(dispatch, "success", error_message="hi\n", exit_code=0, **times)
            == 200
        )
        shown = await ended(worker, task)
        assert (shown["status"], shown["error_message"]) == ("success", "hi\n")
        assert (shown["started_at"], shown["finished_at"]) == tuple(times.values())
        assert shown["outcome"]["exit_code"] == 0

    play(tmp_path, scenario)


def test_the_extra_fields_of_a_submission_reach_the_worker(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "type": "http",
        "image": "debian",
        "profile": "sealed",
        "limits": {"memory_max": "64M", "tasks_max": 3, "cpu_quota": None},
        "http": {"method": "POST", "headers": {"A": "b"}, "body": "x", "expect": [200]},
        "files": {"in.txt": "text"},
        "idempotency_key": "mine",
        "shard_no": 1,
        "shard_total": 2,
    }

    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        await submit(worker, payload="p", instance_id="../x y/\N{SNOWMAN}", **extra)
        dispatch = await worker.next_dispatch()
        assert dispatch["schedule_instance_id"] == "../x y/\N{SNOWMAN}"
        assert dispatch["task_type"] == extra.pop("type")
        assert {name: dispatch[name] for name in extra} == extra

    play(tmp_path, scenario)


def test_a_payload_of_three_megabytes_arrives_whole(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        await submit(worker, payload="x" * 3_000_000 + "\0")
        assert (await worker.next_dispatch())["payload"] == "x" * 3_000_000 + "\0"

    play(tmp_path, scenario)


def test_a_heartbeat_of_an_unknown_worker_gets_404_and_one_of_a_known_worker_200(
    tmp_path: Path,
) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        assert await worker.beat() == 404
        registered = await worker.register(0)
        assert (registered["ID"], registered["Hostname"]) == ("w1", "lab")
        assert registered["MaxConcurrency"] == 100
        assert await worker.beat() == 200

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/workers/register", {"hostname": "h"}),
        ("/api/v1/workers/register", {"worker_id": "w", "hostname": None}),
        ("/api/v1/workers/register", b"no json"),
        ("/api/v1/workers/register", {"worker_id": "w", "hostname": "h", "max_concurrency": "x"}),
        (
            "/api/v1/workers/register",
            {"worker_id": "w", "hostname": "h", "max_concurrency": 10**20},
        ),
        ("/api/v1/workers/heartbeat", {"current_load": 1}),
        ("/api/v1/workers/heartbeat", {"worker_id": "w", "current_load": 10**20}),
        ("/api/v1/workers/heartbeat", {"worker_id": "w", "report_unix_milli": 10**15}),
        ("/api/v1/workers/heartbeat", []),
        ("/api/v1/task-instances/report", {"status": "success"}),
        ("/api/v1/task-instances/report", b"\xff"),
    ],
)
def test_a_bad_body_from_a_worker_is_a_400_with_its_reason(
    tmp_path: Path, path: str, body: Any
) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        status, answer = await worker.call(path, body)
        assert status == 400
        assert answer["error"].startswith("cannot ")

    play(tmp_path, scenario)


def test_missing_and_unknown_fields_do_no_harm(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        body = {"worker_id": "w2", "hostname": "h", "labels": None, "colour": "red"}
        status, _answer = await worker.call("/api/v1/workers/register", body)
        assert status == 201
        status, _answer = await worker.call("/api/v1/workers/heartbeat", {"worker_id": "w2"})
        assert status == 200

    play(tmp_path, scenario)


def test_an_ack_always_gets_200(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        for body in ({"schedule_instance_id": "unknown", "worker_id": "w1"}, {}, b"no json"):
            status, answer = await worker.call("/api/v1/task-instances/ack", body)
            assert (status, answer) == (200, {"status": "ok"})

    play(tmp_path, scenario)


def test_a_report_of_an_unknown_instance_gets_404_and_of_an_unknown_status_400(
    tmp_path: Path,
) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        assert await worker.report("unknown", "success") == 404
        await submit(worker)
        assert await worker.report(await worker.next_dispatch(), "splendid") == 400

    play(tmp_path, scenario)


def test_a_report_after_the_end_gets_200_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, retries=3)
        dispatch = await worker.next_dispatch()
        await worker.report(dispatch, "success", error_message="first")
        for status in ("running", "failed", "timeout", "cancelled", "success"):
            assert await worker.report(dispatch, status, error_message="later") == 200
        shown = await ended(worker, task)
        assert (shown["status"], shown["error_message"]) == ("success", "first")
        assert len(shown["instances"]) == 1

    play(tmp_path, scenario)


def test_a_report_may_overtake_the_answer_to_its_dispatch(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        async def report_first(dispatch: dict[str, Any]) -> web.Response:
            assert await worker.report(dispatch, "running") == 200
            assert await worker.report(dispatch, "success", error_message="quick") == 200
            return web.json_response({"status": "accepted"}, status=202)

        worker.on_execute = report_first
        await worker.register()
        shown = await ended(worker, await submit(worker))
        assert (shown["status"], shown["error_message"]) == ("success", "quick")

    play(tmp_path, scenario)


@pytest.mark.parametrize("status", [301, 400, 413, 500, 503])
def test_a_first_dispatch_that_is_refused_is_final_and_never_retried(
    tmp_path: Path, status: int
) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        async def refuse(_dispatch: dict[str, Any]) -> web.Response:
            return web.json_response({"error": "no thanks"}, status=status)

        worker.on_execute = refuse
        await worker.register()
        shown = await ended(worker, await submit(worker, retries=3))
        assert (shown["status"], shown["error_code"]) == ("failed", "dispatch_failed")
        assert "no thanks" in shown["error_message"]
        assert len(shown["instances"]) == 1
        assert worker.dispatches.qsize() == 1

    play(tmp_path, scenario)


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "no url", "", "http://[broken"])
def test_a_worker_that_cannot_be_reached_fails_the_dispatch(tmp_path: Path, address: str) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        worker.callback_url = address
        await worker.register()
        shown = await ended(worker, await submit(worker))
        assert shown["error_code"] == "dispatch_failed"

    play(tmp_path, scenario)


def test_a_dispatch_that_is_not_answered_in_time_fails_and_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, slow: FakeWorker) -> None:
        async def never(_dispatch: dict[str, Any]) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        slow.on_execute = never
        await slow.register(1)
        stuck = await submit(slow, payload="stuck")
        await slow.next_dispatch()
        async with fake_worker(scheduler.url, "w2") as quick:
            await quick.register(1)
            await submit(quick, payload="free")
            assert (await quick.next_dispatch())["payload"] == "free"
        _, shown = await get(slow.session, f"{scheduler.url}/v1/tasks/{stuck['id']}")
        assert shown["status"] == "sending"
        shown = await ended(slow, stuck)
        assert (shown["error_code"], shown["worker_id"]) == ("dispatch_failed", "w1")
        assert "within 5 s" in shown["error_message"]

    play(tmp_path, scenario)


def test_tasks_queue_until_a_worker_has_room(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        tasks = [await submit(worker, payload=str(number)) for number in range(3)]
        await worker.register(2)
        dispatches = [await worker.next_dispatch(), await worker.next_dispatch()]
        assert {dispatch["payload"] for dispatch in dispatches} == {"0", "1"}
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks/{tasks[2]['id']}")
        assert shown["status"] == "queued"
        assert worker.dispatches.empty()
        await worker.report(dispatches[0], "success")
        assert (await worker.next_dispatch())["payload"] == "2"

    play(tmp_path, scenario)


def test_a_worker_that_reports_full_load_is_passed_over(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, full: FakeWorker) -> None:
        await full.register(8)
        await full.beat(load=8)
        async with fake_worker(scheduler.url, "w2") as free:
            await free.register(1)
            await free.beat(load=0)
            await submit(free)
            await free.next_dispatch()
            await submit(free, payload="second")
            assert full.dispatches.empty()
            await full.beat(load=7)
            assert (await full.next_dispatch())["payload"] == "second"

    play(tmp_path, scenario)


def test_a_worker_with_an_old_heartbeat_goes_offline_and_comes_back(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def is_offline() -> bool:
            _, shown = await get(worker.session, f"{scheduler.url}/v1/workers")
            return bool(shown["workers"][0]["status"] == "offline")

        await worker.register()
        await worker.beat(at=time.time() - 31)
        await until(is_offline)
        await submit(worker, payload="later")
        assert worker.dispatches.empty()
        await worker.beat()
        assert (await worker.next_dispatch())["payload"] == "later"

    play(tmp_path, scenario)


def test_failed_and_timed_out_tasks_are_retried_under_new_ids_as_often_as_asked(
    tmp_path: Path,
) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, retries=2)
        seen = []
        for count, status in enumerate(("failed", "timeout", "failed")):
            dispatch = await worker.next_dispatch()
            assert dispatch["retry_count"] == count
            assert dispatch["idempotency_key"] == f"task-{task['task_id']}"
            seen.append(dispatch["schedule_instance_id"])
            await worker.report(dispatch, status, error_code="x")
        shown = await ended(worker, task)
        assert (shown["status"], shown["id"]) == ("failed", seen[0])
        assert [instance["instance_id"] for instance in shown["instances"]] == seen
        assert seen[1].startswith(f"task-{task['task_id']}-retry-1-")
        assert worker.dispatches.empty()

    play(tmp_path, scenario)


def test_a_policy_on_error_codes_retries_those_alone(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, retries=5, retry_error_codes=["oom_killed"])
        await worker.report(await worker.next_dispatch(), "failed", error_code="oom_killed")
        await worker.report(await worker.next_dispatch(), "failed", error_code="execute_failed")
        assert len((await ended(worker, task))["instances"]) == 2

    play(tmp_path, scenario)


def test_cancel_calls_the_worker_and_writes_cancelled_itself(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, retries=3)
        dispatch = await worker.next_dispatch()
        await worker.report(dispatch, "running")
        status, shown = await post(
            worker.session, f"{scheduler.url}/v1/tasks/{task['id']}/cancel", b""
        )
        assert (status, shown["status"], shown["ended"]) == (200, "cancelled", True)
        assert worker.cancels.get_nowait() == {"schedule_instance_id": task["instance_id"]}
        assert await worker.report(dispatch, "failed") == 200
        assert (await ended(worker, task))["status"] == "cancelled"
        assert worker.dispatches.empty()

    play(tmp_path, scenario)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_cancel_is_written_whatever_the_worker_answers(tmp_path: Path, status: int) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def grumble(_cancel: dict[str, Any]) -> web.Response:
            return web.json_response({"error": "unknown task"}, status=status)

        worker.on_cancel = grumble
        await worker.register()
        task = await submit(worker)
        await worker.next_dispatch()
        _, shown = await post(worker.session, f"{scheduler.url}/v1/tasks/{task['id']}/cancel", b"")
        assert shown["status"] == "cancelled"

    play(tmp_path, scenario)


def test_a_terminal_report_that_arrives_during_the_cancel_call_stands(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def end_first(cancel: dict[str, Any]) -> web.Response:
            await worker.report(cancel["schedule_instance_id"], "failed", error_message="own end")
            return web.json_response({"status": "cancelled"})

        worker.on_cancel = end_first
        await worker.register()
        task = await submit(worker, retries=3)
        await worker.next_dispatch()
        _, shown = await post(worker.session, f"{scheduler.url}/v1/tasks/{task['id']}/cancel", b"")
        assert (shown["status"], shown["error_message"]) == ("failed", "own end")
        assert shown["ended"]

    play(tmp_path, scenario)


def test_cancelling_a_queued_task_calls_nobody_and_it_never_starts(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        task = await submit(worker)
        _, shown = await post(worker.session, f"{scheduler.url}/v1/tasks/{task['id']}/cancel", b"")
        assert shown["status"] == "cancelled"
        await worker.register()
        await submit(worker, payload="another")
        assert (await worker.next_dispatch())["payload"] == "another"
        assert worker.cancels.empty()

    play(tmp_path, scenario)


def test_after_a_kill_the_worker_registers_again_and_no_task_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with scheduler_process(tmp_path) as first, fake_worker(first.url) as worker:
            await worker.register(1)
            running = await submit(worker, payload="running")
            dispatch = await worker.next_dispatch()
            queued = await submit(worker, payload="queued")
            port = first.url.rpartition(":")[2]
            await first.kill()
            async with scheduler_process(tmp_path, f"127.0.0.1:{port}") as second:
                assert second.url == first.url
                assert await worker.beat(1, 1) == 404
                await worker.register(1)
                assert await worker.beat(1, 1) == 200
                assert await worker.report(dispatch, "success", error_message="kept") == 200
                assert (await ended(worker, running))["error_message"] == "kept"
                assert await worker.beat() == 200
                await worker.report(await worker.next_dispatch(), "success")
                assert (await ended(worker, queued))["status"] == "success"

    asyncio.run(main())


def test_a_dispatch_under_way_at_a_kill_is_sent_again_to_the_same_worker_only(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with (
            scheduler_process(tmp_path) as first,
            fake_worker(first.url) as worker,
            fake_worker(first.url, "w2") as other,
        ):
            accept = worker.on_execute

            async def never(_dispatch: dict[str, Any]) -> web.Response:
                await asyncio.Event().wait()
                raise AssertionError

            worker.on_execute = never
            await worker.register()
            await submit(worker)
            before = await worker.next_dispatch()
            await first.kill()
            worker.on_execute = accept
            async with scheduler_process(tmp_path) as second:
                other.scheduler_url = worker.scheduler_url = second.url
                await other.register()
                await submit(other, payload="another")
                assert (await other.next_dispatch())["payload"] == "another"
                await worker.register()
                after = await worker.next_dispatch()
                assert after["schedule_instance_id"] == before["schedule_instance_id"]
                assert other.dispatches.empty()

    asyncio.run(main())
