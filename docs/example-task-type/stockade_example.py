"""Two task types: one that runs a program in a slot, one that runs in the supervisor's loop."""

from __future__ import annotations

import asyncio

from stockade.supervisor.task_types.base import (
    Dispatch,
    ErrorCode,
    LoopPlan,
    Outcome,
    OutputWriter,
    ProcessPlan,
    Status,
    TaskType,
    common_environment,
    invalid,
    refuse_files,
)


class PythonTask(TaskType):
    """The payload is a Python program. It gets a slot: own uid, limits, clean work directory."""

    name = "python"

    def validate(self, dispatch: Dispatch) -> None:
        try:
            compile(dispatch.payload, "payload", "exec")
        except SyntaxError as error:
            raise invalid(f"the payload is not Python: {error.msg}, line {error.lineno}") from error

    def plan(self, dispatch: Dispatch) -> ProcessPlan:
        return ProcessPlan(
            argv=("/usr/bin/python3", "-I", "./program.py"),
            environment={"PATH": "/usr/bin:/bin", **common_environment(dispatch)},
            files={"program.py": dispatch.payload.encode()},
        )


class CountdownTask(TaskType):
    """The payload is a number of seconds. It needs no process: it runs in the supervisor's loop."""

    name = "countdown"

    def validate(self, dispatch: Dispatch) -> None:
        refuse_files(dispatch)
        if not dispatch.payload.isdecimal() or len(dispatch.payload) > 4:
            raise invalid(f"{dispatch.payload[:40]!r} is not a number of seconds below 10000")

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        seconds = int(dispatch.payload)

        async def run(write: OutputWriter) -> Outcome:
            for left in range(seconds, 0, -1):
                write(f"{left}\n".encode())
                await asyncio.sleep(1)  # never time.sleep: heartbeats share this thread
            if seconds == 13:
                return Outcome(Status.FAILED, ErrorCode.EXECUTE_FAILED, reason="bad luck")
            return Outcome(Status.SUCCESS)

        return LoopPlan(run)
