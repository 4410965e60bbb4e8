from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError
from stockade.supervisor.limits import UNLIMITED
from stockade.supervisor.planning import Planner, UnsupportedTaskTypeError, refused
from stockade.supervisor.process_plan import MAX_STRING_BYTES, ProcessPlan, pack_start
from stockade.supervisor.task_types.shell import PAYLOAD_FILE, ShellTask

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
