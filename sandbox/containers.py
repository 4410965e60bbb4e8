"""Container tasks in the spawner: what their clients run with, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import msgspec

from stockade.platform.memfd import sealed_memfd
from stockade.sandbox.children import Children
from stockade.sandbox.engine import Engine, EngineSettings, RunLine
from stockade.sandbox.engine_call import Calls
from stockade.sandbox.engine_sweep import Sweep
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.hand_over import Request
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.loop import Loop
from stockade.sandbox.places import Places
from stockade.sandbox.profiles import Profile
from stockade.sandbox.protocol import Start
from stockade.sandbox.slot import Slot


class Containers:
    """One worker's containers.

    Args:
        hidden: the worker's own directories.
        private_network: containers have no network in the profile private either.
        in_use: the names of the containers of all tasks that live.
    """

    def __init__(
        self, loop: Loop, children: Children, settings: EngineSettings, worker_id: str, *,
        hidden: tuple[str, ...], private_network: bool, in_use: Callable[[], set[str]],
    ) -> None:  # fmt: skip
        self.engine = Engine(settings, worker_id, hidden, private_network=private_network)
        self.calls = Calls(loop, children, self.engine.environment)
        self.sweep = Sweep(loop, self.engine, self.calls, in_use)

    def run_line(self, start: Start, request: Request) -> RunLine:
        """The line that runs a Start's container.

        Raises:
            ContainerRefusedError: it asks for what it may not have.
            SandboxSetupError: no engine is there.
        """
        assert start.container is not None
        line = self.engine.run(
            seq=start.seq,
            instance_id=start.container.instance_id,
            image=start.container.image,
            words=request.argv,
            environment=request.environment,
            limits=start.limits,
            profile=start.profile,
        )
        self._check_engine()
        return line

    def _check_engine(self) -> None:
        """Asks nothing: a client would, and after its failure we would have to find out what of."""
        path = self.engine.settings.socket
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                probe.connect(path)
        except BlockingIOError:
            pass  # it is there, and busy
        except OSError as error:
            raise SandboxSetupError(
                "reach the container engine",
                f"{path}: {error.strerror}; is it running, and is task.container.socket right?",
            ) from error

    @contextlib.contextmanager
    def client(
        self, places: Places, slot: Slot, line: RunLine, start: Start
    ) -> Iterator[tuple[Start, Request]]:
        """The engine's client as a task of its slot: what to start, while the context lasts.

        The environment comes as the client's standard input and never lies on disk. The client runs
        as the spawner's own user, without capabilities: the engine's socket is open to it only.
        """
        with contextlib.ExitStack() as stack:
            stdio = [sealed_memfd("stockade-environment", line.environment_file)]
            stack.callback(os.close, stdio[0])
            output = os.open(
                slot.name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=places.output
            )
            stack.callback(os.close, output)
            stdio += [output, output]
            variables = self.engine.environment.items()
            request = Request(
                argv=list(line.argv),
                environment=[f"{name}={value}".encode() for name, value in variables],
                files=[],
                stdio=stdio,
                own_user=True,
            )
            client = msgspec.structs.replace(
                start, directory="/", profile=Profile.PROCESS, limits=client_limits()
            )
            yield client, request


def client_limits() -> Limits:
    """What holds an engine's client, which is not the task: the container has the task's limits."""
    return Limits(memory_max=512 * MIB, memory_swap_max=None, tasks_max=None, runtime_max=None)
