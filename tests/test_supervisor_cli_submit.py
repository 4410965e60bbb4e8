"""`stockade submit` and `stockade scheduler`: real processes, the worker played by the test."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scheduler_lab import DEADLINE_S, FakeWorker, SchedulerProcess, get, lab, scheduler_process

from stockade.supervisor.cli.submission import exit_status, split_message

Scenario = Callable[[SchedulerProcess, FakeWorker], Awaitable[None]]


class Ended(NamedTuple):
    status: int
    out: str
    err: str


def play(state_dir: Path, scenario: Scenario) -> None:
    async def main() -> None:
        async with lab(state_dir) as (scheduler, worker):
            await scenario(scheduler, worker)

    asyncio.run(main())


async def start_command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stockade.supervisor.cli.main",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def end_of(process: asyncio.subprocess.Process, given: bytes = b"") -> Ended:
    try:
        out, err = await asyncio.wait_for(process.communicate(given), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


async def submit(scheduler: SchedulerProcess, *arguments: str, given: bytes = b"") -> Ended:
    process = await start_command("submit", "--scheduler", scheduler.url, *arguments)
    return await end_of(process, given)


def test_submit_sends_every_option_and_prints_the_id(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        options = "--type http --timeout 2min --image i --profile sealed --idempotency-key k"
        limits = ("--limit", "memory_max=64M", "--limit", "tasks-max=3")
        ended = await submit(scheduler, *options.split(), *limits, "--retries", "2", "echo hi")
        dispatch = await worker.next_dispatch()
        assert ended == (0, dispatch["schedule_instance_id"] + "\n", "")
        assert dispatch["payload"] == "echo hi"
        assert (dispatch["task_type"], dispatch["timeout_seconds"]) == ("http", 120)
        assert (dispatch["image"], dispatch["profile"]) == ("i", "sealed")
        assert dispatch["idempotency_key"] == "k"
        assert dispatch["limits"] == {"memory_max": "64M", "tasks_max": "3"}
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks/1")
        assert shown["submission"]["retries"] == 2

    play(tmp_path, scenario)


def test_a_payload_from_standard_input_may_be_large(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        payload = "echo \N{SNOWMAN}\n" * 150_000
        assert (await submit(scheduler, "-", given=payload.encode())).status == 0
        assert (await worker.next_dispatch())["payload"] == payload

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("report", "status", "out", "err"),
    [
        ({"status": "success", "error_message": "hi\nno newline"}, 0, "hi\nno newline", ""),
        (
            {
                "status": "failed",
                "error_code": "execute_failed",
                "error_message": "exit code 3\nits output\n",
                "exit_code": 3,
            },
            3,
            "its output\n",
            "stockade submit: failed: exit code 3\n",
        ),
        (
            {"status": "timeout", "error_code": "timeout", "error_message": "timed out\npartial"},
            124,
            "partial",
            "stockade submit: timeout: timed out\n",
        ),
        (
            {"status": "failed", "error_code": "signaled", "signal": "SIGSEGV"},
            139,
            "",
            "stockade submit: failed: signaled\n",
        ),
    ],
)
def test_wait_prints_the_excerpt_and_ends_as_the_task_did(
    tmp_path: Path, report: dict[str, Any], status: int, out: str, err: str
) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        waiting = asyncio.ensure_future(submit(scheduler, "--wait", "x"))
        await worker.report(await worker.next_dispatch(), **report)
        assert await waiting == (status, out, err)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("task", "status"),
    [
        ({"status": "success", "error_code": ""}, 0),
        ({"status": "timeout", "error_code": "timeout"}, 124),
        ({"status": "cancelled", "error_code": "cancelled"}, 130),
        ({"status": "failed", "error_code": "oom_killed", "outcome": {"signal": "SIGKILL"}}, 137),
        ({"status": "failed", "error_code": "signaled", "outcome": {"signal": "SIGTERM"}}, 143),
        ({"status": "failed", "error_code": "signaled", "outcome": {"signal": None}}, 137),
        ({"status": "failed", "error_code": "execute_failed", "outcome": {"exit_code": 2}}, 2),
        ({"status": "failed", "error_code": "execute_failed", "outcome": {"exit_code": None}}, 1),
        ({"status": "failed", "error_code": "execute_failed"}, 1),
        ({"status": "failed", "error_code": "spawn_failed"}, 125),
        ({"status": "failed", "error_code": "worker_lost"}, 125),
        ({"status": "failed", "error_code": "dispatch_failed"}, 125),
        ({"status": "failed", "error_code": "unsupported_task_type"}, 125),
        ({"status": "failed", "error_code": ""}, 125),
    ],
)
def test_the_exit_status_is_that_of_run(task: dict[str, Any], status: int) -> None:
    assert exit_status({"outcome": {}, **task}) == status


def test_a_success_whose_output_has_lines_is_no_reason() -> None:
    task = {"status": "success", "error_code": "", "error_message": "one\ntwo"}
    assert split_message(task) == ("", "one\ntwo")


def test_json_prints_one_object_for_the_ended_task(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        waiting = asyncio.ensure_future(submit(scheduler, "--wait", "--json", "x"))
        await worker.report(
            await worker.next_dispatch(),
            "failed",
            error_code="execute_failed",
            error_message="exit code 3",
            exit_code=3,
            wall_s=0.5,
        )
        ended = await waiting
        shown = json.loads(ended.out)
        assert (ended.status, ended.err, shown["status"]) == (3, "", "failed")
        assert (shown["outcome"]["exit_code"], shown["outcome"]["wall_s"]) == (3, 0.5)
        ended = await submit(scheduler, "--json", "y")
        assert json.loads(ended.out)["ended"] is False

    play(tmp_path, scenario)


def test_a_dispatch_that_fails_is_a_failure_of_ours(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        async def refuse(_dispatch: dict[str, Any]) -> web.Response:
            return web.json_response({"error": "no"}, status=500)

        worker.on_execute = refuse
        await worker.register()
        ended = await submit(scheduler, "--wait", "x")
        assert (ended.status, "cannot dispatch to worker w1" in ended.err) == (125, True)

    play(tmp_path, scenario)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_wait_cancels_the_task(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        process = await start_command("submit", "--scheduler", scheduler.url, "--wait", "x")
        ending = asyncio.ensure_future(end_of(process))
        dispatch = await worker.next_dispatch()
        process.send_signal(number)
        ended = await ending
        assert ended.status == status
        assert "cancelling task" in ended.err
        assert worker.cancels.get_nowait() == {
            "schedule_instance_id": dispatch["schedule_instance_id"]
        }
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks/1")
        assert shown["status"] == "cancelled"

    play(tmp_path, scenario)


def test_a_wait_lives_through_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        await worker.register()
        waiting = asyncio.ensure_future(submit(scheduler, "--wait", "x"))
        dispatch = await worker.next_dispatch()
        assert await worker.report(dispatch, "running") == 200
        await scheduler.kill()
        address = scheduler.url.removeprefix("http://")
        async with scheduler_process(tmp_path, address):
            await worker.report(dispatch, "success", error_message="after all\n")
            assert await waiting == (0, "after all\n", "")

    play(tmp_path, scenario)


def test_a_wait_lives_through_a_store_that_cannot_be_used_for_a_moment() -> None:
    task = {"id": "t", "ended": False}
    success = {"status": "success", "error_code": "", "error_message": "after all\n"}
    answers = [
        web.json_response({"error": "cannot use scheduler.db: database is locked"}, status=503),
        web.json_response({**task, **success, "ended": True, "outcome": {}}),
    ]

    async def take(_request: web.Request) -> web.Response:
        return web.json_response(task, status=201)

    async def show(_request: web.Request) -> web.Response:
        return answers.pop(0)

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/tasks", take), web.get("/v1/tasks/t", show)])
        async with TestServer(app) as server:
            process = await start_command(
                "submit", "--scheduler", str(server.make_url("/")), "--wait", "x"
            )
            assert await end_of(process) == (0, "after all\n", "")

    asyncio.run(main())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--timeout", "-1", "x"), "a timeout cannot be negative"),
        (("--timeout=-5s", "x"), "a timeout cannot be negative"),
        (("--timeout", "0.5", "x"), "whole seconds"),
        (("--timeout", "infinity", "x"), "whole seconds"),
        (("--timeout", "soon", "x"), "cannot use --timeout soon"),
        (("--limit", "memory_max", "x"), "memory_max=64M"),
        (("--scheduler", "127.0.0.1:8080", "x"), "not a URL"),
        (("--scheduler", "http://[broken", "x"), "not a URL"),
        (("--scheduler", "http://127.0.0.1:1", "x"), "Connection refused"),
        (("--retries", "-1", "x"), "$.retries"),
        ((b"\xff\xfe".decode(errors="surrogateescape"),), "not UTF-8"),
    ],
)
def test_what_cannot_be_submitted_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], words: str, wait: bool
) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        ended = await submit(scheduler, *(["--wait"] if wait else []), *arguments)
        assert (ended.status, ended.out) == (125 if wait else 1, "")
        assert ended.err.startswith("stockade submit: cannot ")
        assert ended.err.count("\n") == 1
        assert words in ended.err
        _, shown = await get(worker.session, f"{scheduler.url}/v1/tasks")
        assert shown == {"tasks": []}

    play(tmp_path, scenario)


def test_an_answer_of_another_server_is_named_as_such(tmp_path: Path) -> None:
    async def scenario(scheduler: SchedulerProcess, worker: FakeWorker) -> None:
        ended = await submit(scheduler, "--scheduler", worker.callback_url, "x")
        assert (ended.status, "not Stockade's scheduler" in ended.err) == (1, True)

    play(tmp_path, scenario)


def test_the_scheduler_command_serves_and_says_why_it_cannot(tmp_path: Path) -> None:
    async def main() -> None:
        arguments = ("scheduler", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
        process = await start_command(*arguments)
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
            assert line.startswith(b"stockade scheduler: http://127.0.0.1:")
            address = line.decode().strip().rpartition("//")[2]
            again = await start_command("scheduler", "--listen", address)
            ended = await end_of(again)
            assert (ended.status, "port in use" in ended.err) == (1, True)
            wide = await start_command("scheduler", "--listen", "0.0.0.0:0")
            ended = await end_of(wide)
            assert (ended.status, "--allow-networks" in ended.err) == (78, True)
            process.terminate()
        finally:
            ended = await end_of(process)
        assert ended.status == 0

    asyncio.run(main())
