"""The task types that come with Stockade, as one configuration wants them."""

from __future__ import annotations

from typing import Final

from stockade.supervisor.config import Config
from stockade.supervisor.task_types.base import TaskType
from stockade.supervisor.task_types.container import ContainerTask
from stockade.supervisor.task_types.http import HttpTask
from stockade.supervisor.task_types.http_access import Access
from stockade.supervisor.task_types.shell import ShellTask

NAMES: Final = (ShellTask.name, HttpTask.name, ContainerTask.name)


def built_in_types(config: Config) -> tuple[TaskType, ...]:
    """One of each."""
    return (
        ContainerTask(),
        ShellTask(
            path=config.task_shell.path,
            lang=config.task_shell.lang,
            extra=config.task_shell.environment,
            interpreter=config.task_shell.interpreter,
        ),
        HttpTask(
            body_max=config.task_http.body_max,
            redirects_max=config.task_http.redirects_max,
            connect_timeout_s=config.task_http.connect_timeout,
            access=Access(config.task_http.allow, config.task_http.deny),
        ),
    )
