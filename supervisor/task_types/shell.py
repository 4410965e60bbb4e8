"""The task type ``shell``: the payload is a script for ``bash -lc``, or another interpreter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.process_plan import MAX_STRING_BYTES, ProcessPlan
from stockade.supervisor.task_types.base import TaskType, common_environment, invalid

SHELL: Final = "/bin/bash"
PAYLOAD_FILE: Final = ".stockade-payload"
# The name of whoever the task runs as; slots' uids are in no passwd file.
TASK_USER: Final = "stockade-task"

# An argument that says "the next one is the program": -c of shells and Python, -e of Perl and Ruby.
_TAKES_PROGRAM: Final = re.compile(r"-([A-Za-z]*)[ce]")


class ShellTask(TaskType):
    """Runs the payload with an interpreter, by default a login shell, in a clean environment.

    Args:
        interpreter: the program and its arguments; the payload becomes the last one.
        path: the task's PATH.
        lang: its LANG.
        extra: further variables from the configuration; they win over the fixed ones.
    """

    name: ClassVar[str] = "shell"

    def __init__(
        self, *, path: str, lang: str, extra: Mapping[str, str],
        interpreter: Sequence[str] = (SHELL, "-lc"),
    ) -> None:  # fmt: skip
        self._interpreter = tuple(interpreter)
        self._base = shell_environment(path=path, lang=lang)
        self._extra = dict(extra)

    def plan(self, dispatch: Dispatch) -> ProcessPlan:
        payload = _encoded(dispatch.payload, "the payload")
        files = _files(dispatch.files)
        if len(payload) > MAX_STRING_BYTES:
            # Longer than one argument can be: the interpreter reads it from its work directory.
            argv = (*self._without_program_flag(), f"./{PAYLOAD_FILE}")
            files = {**files, PAYLOAD_FILE: payload}
        else:
            argv = (*self._interpreter, dispatch.payload)
        return ProcessPlan(
            argv=argv,
            environment={**self._base, **common_environment(dispatch), **self._extra},
            files=files,
        )

    def _without_program_flag(self) -> tuple[str, ...]:
        """The interpreter as it runs a file: ``bash -l`` for ``bash -lc``."""
        *kept, last = self._interpreter
        match = _TAKES_PROGRAM.fullmatch(last)
        if match is None:
            raise invalid(
                f"cannot start the task: the payload takes more than {MAX_STRING_BYTES} bytes, and"
                f" task.shell.interpreter ends with {last!r}, which cannot be told to read a file;"
                " it can when it ends with -c or -e"
            )
        return (*kept, f"-{match[1]}") if match[1] else tuple(kept)


def _files(files: Mapping[str, str]) -> dict[str, bytes]:
    if PAYLOAD_FILE in files:
        raise invalid(f"cannot start the task: the file name {PAYLOAD_FILE} is the worker's own")
    return {name: _encoded(content, f"file {name!r}") for name, content in files.items()}


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


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"cannot start the task: {what} is not valid text: {error}") from error
