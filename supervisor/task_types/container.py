"""The task type ``container``: an image, and arguments for the engine's ``run``.

The engine is the spawner's alone: here a payload becomes words, and what the words may say is
checked where the command line is built, in sandbox/engine_flags.py.
"""

from __future__ import annotations

import os
import shlex
import shutil
from typing import ClassVar, Final

from stockade.sandbox.engine import EngineSettings
from stockade.sandbox.protocol import Container
from stockade.supervisor.config import ContainerConfig
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.process_plan import ProcessPlan
from stockade.supervisor.task_types.base import (
    TaskType,
    common_environment,
    invalid,
    refuse_files,
)

# In this order.
ENGINES: Final = ("docker", "podman")
NO_ENGINE: Final = "none"


class ContainerTask(TaskType):
    """Runs the dispatch's image; the payload is flags and then the container's command."""

    name: ClassVar[str] = "container"

    def plan(self, dispatch: Dispatch) -> ProcessPlan:
        refuse_files(dispatch)
        image = dispatch.image.strip()
        if not image:
            raise invalid("cannot run a container: there is no image; the dispatch's `image` is it")
        try:
            words = shlex.split(dispatch.payload)
        except ValueError as error:
            raise invalid(
                f"cannot run a container: the payload cannot be split into words: {error}"
            ) from error
        return ProcessPlan(
            argv=tuple(words),
            environment=common_environment(dispatch),
            container=Container(image=image[:1024], instance_id=dispatch.instance_id),
        )


def engine_settings(config: ContainerConfig, path: str) -> EngineSettings | None:
    """The engine that container tasks run on; None when there is none.

    Args:
        config: ``[task.container]``.
        path: where clients are looked for, as PATH has it.

    Raises:
        ConfigError: the one that is configured is not there.
    """
    program = _find(config.engine, path)
    if program is None:
        if config.engine not in ("", NO_ENGINE):
            raise ConfigError(
                f"cannot use task.container.engine {config.engine}: there is no such program in"
                f' PATH; install it, name another one, or "{NO_ENGINE}" for no container tasks'
            )
        return None
    return EngineSettings(
        program=program,
        socket=str(config.socket or default_socket(program)),
        network=config.network,
        pull=config.pull.value,
        flags=config.flags,
        volumes=config.volumes,
    )


def _find(wanted: str, path: str) -> str | None:
    if wanted == NO_ENGINE:
        return None
    for name in (wanted,) if wanted else ENGINES:
        found = shutil.which(name, path=path)
        if found is not None:
            return os.path.abspath(found)
    return None


def default_socket(program: str) -> str:
    """Where an engine listens when nobody says otherwise."""
    if "podman" not in os.path.basename(program):
        return "/run/docker.sock"
    if os.geteuid() == 0:
        return "/run/podman/podman.sock"
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return os.path.join(base, "podman/podman.sock")
