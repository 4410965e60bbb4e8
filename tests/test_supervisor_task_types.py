from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError
from stockade.supervisor.limits import UNLIMITED
from stockade.supervisor.planning import Planner, UnsupportedTaskTypeError, refused
from stockade.supervisor.process_plan import MAX_STRING_BYTES, ProcessPlan, pack_start
from stockade.supervisor.task_types.http import HttpTask
from stockade.supervisor.task_types.shell import PAYLOAD_FILE, ShellTask
from stockade.supervisor.wire.messages import HttpRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def shell(**fields: Any) -> ProcessPlan:
    task = ShellTask(path="/bin", lang="C.UTF-8", extra={"EXTRA": "e", "LANG": "xx"})
    return task.plan(Dispatch(instance_id="t", **fields))


def test_shell_payload_is_one_argument_of_a_login_shell() -> None:
    plan = shell(payload="echo 'a b'")
    assert plan.argv == ("/bin/bash", "-lc", "echo 'a b'")
    assert plan.files == {}


def test_shell_environment_is_the_fixed_one_the_tasks_and_the_configured() -> None:
    plan = shell(payload="", shard_no=1, shard_total=2, idempotency_key="k")
    assert plan.environment == {
        "PATH": "/bin",
        "USER": "stockade-task",
        "LOGNAME": "stockade-task",
        "SHELL": "/bin/bash",
        "LANG": "xx",
        "SANDBOX": "true",
        "IDEMPOTENCY_KEY": "k",
        "SHARD_NO": "1",
        "SHARD_TOTAL": "2",
        "SCHEDULE_INSTANCE_ID": "t",
        "EXTRA": "e",
    }


def test_shell_payload_past_one_argument_goes_by_file() -> None:
    longest, longer = "x" * MAX_STRING_BYTES, "é" + "x" * (MAX_STRING_BYTES - 1)
    assert shell(payload=longest).files == {}
    plan = shell(payload=longer)
    assert plan.files == {PAYLOAD_FILE: longer.encode()}
    for each in (plan, shell(payload=longest)):
        pack_start(1, each, Limits(), "process")


def planner(**changes: Any) -> Planner:
    task = ShellTask(path="/bin", lang="C", extra={})
    return Planner(
        **{
            "limits": Limits(),
            "limits_max": UNLIMITED,
            "profile": "process",
            "unavailable": {},
            "task_types": {"shell": task},
            **changes,
        }
    )


def test_unknown_type_and_bad_fields_have_their_own_codes() -> None:
    with pytest.raises(UnsupportedTaskTypeError) as caught:
        planner().plan(Dispatch(instance_id="t", task_type="perl"))
    assert refused(caught.value).error_code is ErrorCode.UNSUPPORTED_TASK_TYPE
    with pytest.raises(RejectedError) as invalid:
        planner().plan(Dispatch(instance_id="t", task_type="shell", limits={"memory_max": "x"}))
    assert refused(invalid.value).error_code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("own", "wish", "expected"),
    [
        ("process", None, "process"),
        ("private", None, "private"),
        ("private", "process", "private"),
        ("process", "private", "private"),
    ],
)
def test_profile_is_tightened_by_a_wish_and_never_loosened(
    own: str, wish: str | None, expected: str
) -> None:
    planned = planner(profile=own).plan(Dispatch(instance_id="t", task_type="shell", profile=wish))
    assert planned.profile == expected


def test_profile_that_is_not_available_is_refused_and_never_weakened() -> None:
    with pytest.raises(RejectedError, match="profile sealed is not available on this host: why"):
        planner(unavailable={"sealed": "why"}).plan(
            Dispatch(instance_id="t", task_type="shell", profile="sealed")
        )


def ask(
    handler: Handler, path: str = "/", *, body_max: int = 1000, **fields: Any
) -> tuple[Outcome, bytes]:
    """Run an http task against a server of one handler: its outcome and output."""

    async def main() -> tuple[Outcome, bytes]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        task = HttpTask(body_max=body_max, redirects_max=3)
        output = bytearray()
        try:
            payload = f" http://127.0.0.1:{port}{path}\n"
            plan = task.plan(Dispatch(instance_id="t", payload=payload, **fields))
            return await plan.run(output.extend), bytes(output)
        finally:
            await task.close()
            await runner.cleanup()

    return asyncio.run(main())


def test_http_get_carries_the_idempotency_key_and_its_body_is_the_output() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.headers['X-Idempotency-Key']}")

    outcome, output = ask(answer, idempotency_key="key-1")
    assert (outcome.status, output) == (Status.SUCCESS, b"GET key-1")


@pytest.mark.parametrize("status", [300, 404, 500, 503])
def test_http_status_from_300_on_fails_and_is_named(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="why")

    outcome, output = ask(answer)
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.EXECUTE_FAILED)
    assert str(status) in outcome.reason
    assert output == b"why"


def test_http_expected_status_succeeds() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404, text=await request.text())

    wish = HttpRequest(method="post", body="sent", expect=[404], headers={"X-A": "b"})
    outcome, output = ask(answer, http=wish)
    assert (outcome.status, output) == (Status.SUCCESS, b"sent")


def test_http_body_is_bounded() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 10_000)
        except ConnectionError:
            pass
        return response

    outcome, output = ask(answer, body_max=25_000)
    assert (outcome.status, outcome.output_truncated) == (Status.SUCCESS, True)
    assert output == b"x" * 25_000


def test_http_redirects_are_followed_and_bounded() -> None:
    async def answer(request: web.Request) -> web.Response:
        number = int(request.path[1:])
        if not number:
            return web.Response(text="there")
        raise web.HTTPFound(f"/{number - 1}")

    assert ask(answer, "/2")[1] == b"there"
    outcome, _ = ask(answer, "/9")
    assert outcome.reason.endswith("more than 3 redirects")


def test_http_without_a_server_fails_with_a_reason() -> None:
    async def main() -> Outcome:
        task = HttpTask(body_max=10, redirects_max=1)
        plan = task.plan(Dispatch(instance_id="t", payload="http://127.0.0.1:1/"))
        try:
            return await plan.run(lambda _: None)
        finally:
            await task.close()

    outcome = asyncio.run(main())
    assert outcome.error_code is ErrorCode.EXECUTE_FAILED
    assert "127.0.0.1:1" in outcome.reason


@pytest.mark.parametrize(
    ("payload", "wish"),
    [
        ("", None),
        ("file:///etc/passwd", None),
        ("//host/x", None),
        ("http://", None),
        ("http://[x/", None),
        ("http://a/", HttpRequest(headers={"X": "a\r\nY: b"})),
        ("http://a/", HttpRequest(method="GET /")),
    ],
)
def test_http_request_that_cannot_be_made_is_invalid(
    payload: str, wish: HttpRequest | None
) -> None:
    task = HttpTask(body_max=10, redirects_max=1)
    with pytest.raises(RejectedError):
        task.plan(Dispatch(instance_id="t", payload=payload, http=wish))
