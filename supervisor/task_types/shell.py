"""The task type ``shell``: the payload is a script for ``bash -lc``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.process_plan import MAX_STRING_BYTES, ProcessPlan
from stockade.supervisor.task_types.base import TaskType, common_environment

SHELL: Final = "/bin/bash"
PAYLOAD_FILE: Final = ".stockade-payload"
# The name of whoever the task runs as; slots' uids are in no passwd file.
TASK_USER: Final = "stockade-task"


class ShellTask(TaskType):
    """Runs the payload in a login shell with a clean environment.

    Args:
        path: the task's PATH.
        lang: its LANG.
        extra: further variables from the configuration; they win over the fixed ones.
    """

    name: ClassVar[str] = "shell"

    def __init__(self, *, path: str, lang: str, extra: Mapping[str, str]) -> None:
        self._base = shell_environment(path=path, lang=lang)
        self._extra = dict(extra)

    def plan(self, dispatch: Dispatch) -> ProcessPlan:
        try:
            payload = dispatch.payload.encode()
        except UnicodeEncodeError as error:
            raise RejectedError(
                Rejection.INVALID, f"cannot start the task: the payload is not valid text: {error}"
            ) from error
        script, files = dispatch.payload, {}
        if len(payload) > MAX_STRING_BYTES:
            # Longer than one argument can be: the shell reads it from its work directory instead.
            script, files = f'. "./{PAYLOAD_FILE}"', {PAYLOAD_FILE: payload}
        return ProcessPlan(
            argv=(SHELL, "-lc", script),
            environment={**self._base, **common_environment(dispatch), **self._extra},
            files=files,
        )


def shell_environment(*, path: str, lang: str) -> dict[str, str]:
    """The fixed part of a task's environment; HOME, TMPDIR and PWD come with the slot."""
    return {
        "PATH": path,
        "USER": TASK_USER,
        "LOGNAME": TASK_USER,
        "SHELL": SHELL,
        "LANG": lang,
        "SANDBOX": "true",
    }
