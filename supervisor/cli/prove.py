"""``stockade doctor --prove``: runs hostile tasks on this very host, beside one that is not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stockade.platform import proc
from stockade.platform.errors import StockadeError
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Outcome
from stockade.sandbox.profiles import WHOLE_VIEW, Profile
from stockade.sandbox.protocol import Acknowledge, Cancel, Ended, Started
from stockade.supervisor.cli.hostile import LIMITS, NEIGHBOUR, Hostile
from stockade.supervisor.cli.proof import Observed, Proof, Verdict, judge
from stockade.supervisor.cli.run import DEFAULT_LANG, DEFAULT_PATH
from stockade.supervisor.cli.sandboxed import OwnSpawner, own_spawner
from stockade.supervisor.process_plan import ProcessPlan, pack_start
from stockade.supervisor.task_types.shell import shell_environment

OUTPUT_MAX_BYTES: Final = 64 * 1024
# What is left of a task may take this long to be gone; the kill itself was waited for before.
GONE_S: Final = 20.0
_LOOK_S: Final = 0.05
# The last process of a task is gone a moment before its end of the pipe is.
_HELD_S: Final = 1.0


def prove(tasks: Sequence[Hostile], profile: Profile, host: HostCapabilities) -> Iterator[Proof]:
    """Runs the tasks one after the other beside one that must come to no harm.

    Raises:
        StockadeError: the sandbox could not be set up at all.
    """
    with own_spawner(profile, WHOLE_VIEW) as spawner, _Range(spawner, profile) as place:
        for task in tasks:
            yield judge(task, place.run(task), profile, host)
        lives = place.neighbour_lives()
        yield Proof(
            "neighbour",
            "harm the task that runs beside all of these",
            Verdict.CONTAINED if lives else Verdict.NOT_CONTAINED,
            "it ran to the last" if lives else "it ended early",
        )


class _Range:
    """Where the tasks run: a spawner, what there is to reach, and the task beside them."""

    _NEIGHBOUR_SEQ: Final = 1

    def __init__(self, spawner: OwnSpawner, profile: Profile) -> None:
        self._spawner = spawner
        self._profile = profile
        self._mark = f"stockade-prove-{secrets.token_hex(8)}"
        self._seq = self._NEIGHBOUR_SEQ
        self._pids: dict[int, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._environment: dict[str, str] = {}
        self._own_work: set[str] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Range:
        with contextlib.ExitStack() as stack:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            # As open to all as the message bus, or a careless container engine.
            path = self._spawner.directory / "host.sock"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen()
            self._environment = {
                "HOST_PORT": str(port.getsockname()[1]),
                "HOST_SOCKET": str(path),
                "HOST_DIRECTORY": str(self._spawner.directory),
            }
            stack.callback(self._end_neighbour)
            self._start_neighbour(stack)
            self._own_work = self._work()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, task: Hostile) -> Observed:
        """Runs one task to its end, and looks for what it left."""
        self._seq += 1
        seq = self._seq
        mark = f"{self._mark}-{task.name}"
        limits = dataclasses.replace(LIMITS, **task.limits)
        with Output() as output:
            self._start(seq, task.script, limits, mark, output)
            self._follow(output, lambda: seq in self._outcomes)
            # Its processes were seen to be gone before the outcome was told: they get no time.
            left = what_lives(mark, output)
        self._spawner.send(Acknowledge(seq=seq))
        left += [f"its work directory {name}" for name in self._work_left()]
        return Observed(self._outcomes[seq], output.text, tuple(left))

    def neighbour_lives(self) -> bool:
        """Whether the task beside them runs."""
        while self._spawner.is_readable():
            self._receive()
        # Its end is told a moment after it.
        process = proc.process(self._pids[self._NEIGHBOUR_SEQ])
        return (
            self._NEIGHBOUR_SEQ not in self._outcomes and process is not None and process.is_alive
        )

    def _start_neighbour(self, stack: contextlib.ExitStack) -> None:
        seq = self._NEIGHBOUR_SEQ
        mark = f"{self._mark}{secrets.token_hex(3)}"
        output = stack.enter_context(Output())
        limits = dataclasses.replace(LIMITS, runtime_max=None, memory_max=LIMITS.memory_max)
        self._start(seq, NEIGHBOUR, limits, mark, output)
        self._follow(
            output, lambda: seq in self._outcomes or (seq in self._pids and "\n" in output.text)
        )
        words = output.text.split(maxsplit=2)
        if seq in self._outcomes or words[:1] != ["ready"]:
            ended = self._outcomes.get(seq)
            why = f"{ended.reason if ended else ''} {output.text}".strip()
            raise StockadeError(f"cannot prove anything: the task to run beside: {why}")
        self._environment |= {
            "NEIGHBOUR_MARK": mark,
            "NEIGHBOUR_PID": str(self._pids[seq]),
            "NEIGHBOUR_PORT": words[1],
            "NEIGHBOUR_DIRECTORY": words[2].rstrip(),
        }

    def _end_neighbour(self) -> None:
        seq = self._NEIGHBOUR_SEQ
        self._spawner.send(Cancel(seq=seq))
        with Output() as nothing:
            self._follow(nothing, lambda: seq in self._outcomes)
        self._spawner.send(Acknowledge(seq=seq))

    def _start(self, seq: int, script: str, limits: Limits, mark: str, output: Output) -> None:
        environment = {
            **shell_environment(path=DEFAULT_PATH, lang=DEFAULT_LANG),
            **self._environment,
            "MARK": mark,
        }
        plan = ProcessPlan(("/bin/bash", "-c", script), environment)
        packed = pack_start(seq, plan, limits, self._profile, own_stdio=True)
        with open(os.devnull, "rb") as null:
            self._spawner.start(packed, [null.fileno(), output.write_end, output.write_end])
        output.close_for_task()

    def _follow(self, output: Output, is_done: Callable[[], bool]) -> None:
        while not is_done():
            poll = select.poll()
            poll.register(self._spawner, select.POLLIN)
            if output.read_end >= 0:
                poll.register(output.read_end, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == output.read_end:
                    output.read()
                else:
                    self._receive()

    def _receive(self) -> None:
        message = self._spawner.receive()
        if isinstance(message, Started):
            self._pids[message.seq] = message.pid
        elif isinstance(message, Ended):
            self._outcomes[message.seq] = message.outcome

    def _work(self) -> set[str]:
        return set(os.listdir(self._spawner.directory / "work"))

    def _work_left(self) -> list[str]:
        deadline = time.monotonic() + GONE_S
        while left := self._work() - self._own_work:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        return sorted(left)


class Output:
    """What a task prints, both streams in one, as far as OUTPUT_MAX_BYTES."""

    def __init__(self) -> None:
        self._bytes = b""
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_for_task()
        self._close_read_end()

    @property
    def text(self) -> str:
        return self._bytes.decode("utf-8", "replace")

    def read(self) -> bool:
        """Takes a piece; False when there is none now, or will be none any more."""
        try:
            data = os.read(self.read_end, OUTPUT_MAX_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_read_end()
            return False
        self._bytes = (self._bytes + data)[:OUTPUT_MAX_BYTES]
        return True

    def is_held(self) -> bool:
        """Takes the rest; whether there is a process still that could write more."""
        deadline = time.monotonic() + _HELD_S
        poll = select.poll()
        poll.register(self.read_end, select.POLLIN)
        while self.read_end >= 0 and time.monotonic() < deadline:
            poll.poll(_LOOK_S * 1000)
            self.read()
        return self.read_end >= 0

    def close_for_task(self) -> None:
        """Ours must not keep the pipe open when the task is gone."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _close_read_end(self) -> None:
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1


def what_lives(mark: str, output: Output) -> list[str]:
    """What lives of the task that has this mark and this output.

    A process that is always another one is never found by looking; its output shows it.
    """
    found = [f"process {pid}" for pid in processes_with(mark)]
    if output.read_end >= 0 and output.is_held() and not found:
        found.append("a process that holds its output")
    return found


def processes_with(mark: str) -> list[int]:
    """Pids of live processes that were started with MARK set to ``mark``: all of a task's."""
    wanted = f"MARK={mark}\0".encode()
    found = []
    for pid in proc.all_processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read():
                found.append(pid)
    return found
