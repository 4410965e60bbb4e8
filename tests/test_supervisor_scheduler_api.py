"""The scheduler's own API and its status page, over real sockets."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scheduler_lab import (
    DEADLINE_S,
    FakeWorker,
    SchedulerProcess,
    ended,
    fake_worker,
    get,
    play,
    post,
    submit,
)

from stockade.supervisor.scheduler.app import Scheduler
from stockade.supervisor.scheduler.settings import Settings


def test_a_bad_submission_is_a_400_that_names_the_field(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        for body, named in (({"paylod": "x"}, "paylod"), ({"retries": "2"}, "$.retries")):
            status, answer = await post(worker.session, f"{scheduler.url}/v1/tasks", body)
            assert status == 400
            assert named in answer["error"]
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks")
        assert shown == {"tasks": []}

    play(tmp_path, scenario)


def test_a_submission_beyond_what_a_dispatch_may_hold_is_a_413(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        status, answer = await post(
            worker.session, f"{scheduler.url}/v1/tasks", {"payload": "x" * (4 << 20)}
        )
        assert status == 413
        assert "error" in answer

    play(tmp_path, scenario)


def test_waiting_returns_at_the_end_of_the_last_retry_and_not_before(tmp_path: Path) -> None:
    async def scenario(_: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        task = await submit(worker, retries=1)
        waiting = asyncio.ensure_future(ended(worker, task))
        await worker.report(await worker.next_dispatch(), "failed")
        dispatch = await worker.next_dispatch()
        assert not waiting.done()
        await worker.report(dispatch, "success", error_message="second try")
        shown = await asyncio.wait_for(waiting, DEADLINE_S)
        assert (shown["status"], shown["error_message"]) == ("success", "second try")

    play(tmp_path, scenario)


def test_waiting_ends_with_the_task_as_it_is_when_the_time_is_up(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        task = await submit(worker)
        url = f"{scheduler.url}/v1/tasks/{task['id']}"
        for wait in ("0", "0.2"):
            status, shown = await get(worker.session, url, params={"wait": wait})
            assert (status, shown["status"], shown["ended"]) == (200, "queued", False)
        for wait in ("soon", "-1", "nan"):
            status, answer = await get(worker.session, url, params={"wait": wait})
            assert (status, "cannot use wait=" in answer["error"]) == (400, True)

    play(tmp_path, scenario)


def test_an_unknown_task_is_a_404_everywhere(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        url = f"{scheduler.url}/v1/tasks/nothing"
        status, answer = await get(worker.session, url)
        assert (status, "cannot find task 'nothing'" in answer["error"]) == (404, True)
        for action in ("cancel", "dispatch"):
            status, _answer = await post(worker.session, f"{url}/{action}", b"")
            assert status == 404

    play(tmp_path, scenario)


def test_the_list_has_the_newest_first_and_no_payloads(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        for number in range(3):
            await submit(worker, payload=f"echo {number}\n" + "x" * 5000)
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks", params={"limit": "2"})
        assert [task["task_id"] for task in shown["tasks"]] == [3, 2]
        assert shown["tasks"][0]["title"].startswith("echo 2 xxx")
        assert len(shown["tasks"][0]["title"]) == 200
        _, shown = await get(
            worker.session, f"{scheduler.url}/v1/tasks", params={"status": "success"}
        )
        assert shown == {"tasks": []}
        status, _answer = await get(
            worker.session, f"{scheduler.url}/v1/tasks", params={"status": "splendid"}
        )
        assert status == 400

    play(tmp_path, scenario)


def test_an_id_with_a_slash_and_other_signs_can_be_asked_for(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await submit(worker, payload="x", instance_id="../a b?#%")
        status, shown = await get(worker.session, f"{scheduler.url}/v1/tasks/..%2Fa%20b%3F%23%25")
        assert (status, shown["id"]) == (200, "../a b?#%")

    play(tmp_path, scenario)


def test_dispatch_sends_the_same_instance_again_and_changes_no_state(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def refuse(_dispatch: dict[str, Any]) -> web.Response:
            return web.json_response({"error": "no"}, status=500)

        task = await submit(worker, payload="once")
        url = f"{scheduler.url}/v1/tasks/{task['id']}/dispatch"
        status, answer = await post(worker.session, url, b"")
        assert (status, "was not sent yet" in answer["error"]) == (409, True)
        await worker.register()
        first = await worker.next_dispatch()
        status, answer = await post(worker.session, url, b"")
        assert (status, answer["accepted"], answer["answer_status"]) == (200, True, 202)
        assert await worker.next_dispatch() == first
        await worker.report(first, "success")
        status, answer = await post(worker.session, url, b"")
        assert (status, await worker.next_dispatch()) == (200, first)
        worker.on_execute = refuse
        status, answer = await post(worker.session, url, b"")
        assert (status, answer["answer_status"]) == (502, 500)
        assert (await ended(worker, task))["status"] == "success"

    play(tmp_path, scenario)


def test_submitting_a_known_instance_id_sends_it_again(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        body = {"payload": "x", "instance_id": "mine"}
        await submit(worker, **body)
        first = await worker.next_dispatch()
        assert first["schedule_instance_id"] == "mine"
        status, answer = await post(worker.session, f"{scheduler.url}/v1/tasks", body)
        assert (status, answer["task_id"]) == (200, 1)
        assert await worker.next_dispatch() == first
        status, answer = await post(
            worker.session, f"{scheduler.url}/v1/tasks", {**body, "payload": "y"}
        )
        assert (status, "other contents" in answer["error"]) == (409, True)

    play(tmp_path, scenario)


def test_workers_are_listed_with_their_load(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register(4)
        await worker.beat(load=3, running=2)
        _, shown = await get(worker.session, f"{scheduler.url}/v1/workers")
        (listed,) = shown["workers"]
        assert (listed["worker_id"], listed["status"]) == ("w1", "online")
        assert (listed["current_load"], listed["running_tasks"], listed["room"]) == (3, 2, 1)

    play(tmp_path, scenario)


def test_the_page_shows_tasks_and_workers_and_escapes_what_they_say(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def page() -> tuple[str, str]:
            async with worker.session.get(scheduler.url) as response:
                assert response.status == 200
                assert response.content_type == "text/html"
                return await response.text(), response.headers["Content-Security-Policy"]

        empty, policy = await page()
        assert "None has registered yet" in empty
        assert scheduler.url in empty
        assert "default-src 'none'" in policy
        worker.worker_id = "<b>w</b>"
        await worker.register()
        await submit(worker, payload="<script>alert(1)</script>")
        dispatch = await worker.next_dispatch()
        await worker.report(dispatch, "failed", error_code="<i>", error_message="<img src=x>\0")
        text, _ = await page()
        for hostile in ("<script", "<b>w", "<i>", "<img"):
            assert hostile not in text
        assert "&lt;script&gt;alert(1)" in text
        assert 'http-equiv="refresh"' in text
        assert "prefers-color-scheme: dark" in text

    play(tmp_path, scenario)


def test_health_is_ok_and_what_does_not_exist_is_said_in_json(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        assert await get(worker.session, f"{scheduler.url}/healthz") == (200, {"status": "ok"})
        status, answer = await get(worker.session, f"{scheduler.url}/v2")
        assert (status, "error" in answer) == (404, True)
        async with worker.session.delete(f"{scheduler.url}/v1/tasks") as response:
            assert response.status == 405
            assert "POST" in response.headers["Allow"]
            assert "error" in await response.json()

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Host": "["},
        {"Host": "rebound.example"},
        {"Origin": "http://rebound.example", "Host": "rebound.example"},
    ],
)
def test_pages_of_other_sites_can_submit_nothing(tmp_path: Path, headers: dict[str, str]) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        url = f"{scheduler.url}/v1/tasks"
        status, _answer = await post(worker.session, url, {"payload": "x"}, headers=headers)
        assert status == 403
        own = {"Origin": scheduler.url}
        status, _answer = await post(worker.session, url, {"payload": "x"}, headers=own)
        assert status == 201

    play(tmp_path, scenario)


def test_only_this_host_and_allowed_networks_are_let_in(tmp_path: Path) -> None:
    async def main() -> None:
        settings = Settings(
            state_dir=str(tmp_path),
            host="0.0.0.0",
            port=0,
            allow_networks=(ipaddress.ip_network("203.0.113.7/32"),),
        )
        scheduler = await Scheduler.start(settings)
        try:
            async with fake_worker(scheduler.url) as worker:
                url = scheduler.url.replace("0.0.0.0", "127.0.0.1")
                status, _answer = await get(worker.session, f"{url}/healthz")
                assert status == 200
                outside = own_address()
                if outside is None:
                    pytest.skip("this host has no address but loopback")
                port = url.rpartition(":")[2]
                status, answer = await get(worker.session, f"http://{outside}:{port}/healthz")
                assert (status, "not in --allow-networks" in answer["error"]) == (403, True)
        finally:
            await scheduler.close()

    asyncio.run(main())


def own_address() -> str | None:
    import socket

    # Connecting a datagram socket sends nothing; it only asks for the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address
