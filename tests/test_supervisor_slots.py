from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from worker_process import eventually, make_place, processes_that_name

from stockade.platform import pidfd
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Status
from stockade.sandbox.profiles import Profile
from stockade.sandbox.protocol import Ended, Prepared, Started, Welcome
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner
from stockade.supervisor.errors import RejectedError, SpawnerLostError
from stockade.supervisor.process_plan import ProcessPlan, pack_start
from stockade.supervisor.slots import SpawnerClient

DEADLINE_S = 30.0


class Listener:
    """Records what the spawner says."""

    def __init__(self) -> None:
        self.welcomes: list[Welcome] = []
        self.started: dict[int, Started] = {}
        self.ended: dict[int, Ended] = {}
        self.outputs: dict[int, int] = {}
        self.calls: list[str] = []
        self.changed = asyncio.Event()
        self.hold: Callable[[], Awaitable[None]] | None = None

    async def spawner_connected(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)
        self._note("connected")
        if self.hold is not None:
            await self.hold()

    def spawner_lost(self) -> None:
        self._note("lost")

    def task_prepared(self, prepared: Prepared, output_fd: int | None) -> None:
        self._keep(prepared.seq, output_fd)
        self._note(f"prepared {prepared.seq}")

    def task_started(self, started: Started, output_fd: int | None) -> None:
        self.started[started.seq] = started
        self._keep(started.seq, output_fd)
        self._note(f"started {started.seq}")

    def task_unstarted(self, seq: int) -> None:
        self._note(f"unstarted {seq}")

    def task_ended(self, ended: Ended, output_fd: int | None) -> None:
        self.ended[ended.seq] = ended
        self._keep(ended.seq, output_fd)
        self._note(f"ended {ended.seq}")

    def _keep(self, seq: int, output_fd: int | None) -> None:
        if output_fd is not None and seq in self.outputs:
            os.close(output_fd)
        elif output_fd is not None:
            self.outputs[seq] = output_fd

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.changed.set()

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()


class Lab:
    """A real spawner, and clients of it."""

    def __init__(self, place: Path) -> None:
        self.settings = SpawnerSettings(
            worker_id=place.name,
            runtime_dir=str(place / "run"),
            state_dir=str(place / "state"),
            supervisor_uid=os.geteuid(),
            supervisor_gid=os.getegid(),
            uid_min=0x70020000,
            profile=Profile.PROCESS,
            uid_max=0x70020FFF,
        )
        self.socket_path = Path(start_spawner(self.settings).socket_path)

    def spawners(self) -> list[int]:
        return processes_that_name(f'"runtime_dir": "{self.settings.runtime_dir}"')

    def run(self, body: Callable[[SpawnerClient, Listener], Awaitable[None]]) -> None:
        async def main() -> None:
            listener = Listener()
            client = SpawnerClient(self.socket_path, listener, software="test", give_up_s=2.0)
            connection = asyncio.create_task(client.run())
            try:
                await listener.until(lambda: listener.welcomes)
                await body(client, listener)
            finally:
                for output_fd in listener.outputs.values():
                    os.close(output_fd)
                connection.cancel()
                await asyncio.wait([connection])

        asyncio.run(main())


@pytest.fixture
def lab() -> Iterator[Lab]:
    place = make_place()
    made = Lab(place)
    yield made

    async def finish(client: SpawnerClient, listener: Listener) -> None:
        for task, output_fd in await client.list_tasks():
            client.cancel(task.seq)
            if output_fd is not None:
                os.close(output_fd)
        await listener.until(lambda: all("lost" not in call for call in listener.calls))
        while tasks := await client.list_tasks():
            for task, output_fd in tasks:
                client.acknowledge(task.seq)
                if output_fd is not None:
                    os.close(output_fd)
            await asyncio.sleep(0.01)
        client.finish()

    if made.spawners():
        made.run(finish)
    eventually(lambda: not made.spawners())
    shutil.rmtree(place)


def start(client: SpawnerClient, seq: int, script: str, limits: Limits | None = None) -> None:
    plan = ProcessPlan(("/bin/bash", "-c", script), {"PATH": "/usr/bin:/bin"})
    client.start(pack_start(seq, plan, limits or Limits(), "process"))


def test_prepared_carries_the_output_and_ended_the_outcome(lab: Lab) -> None:
    async def body(client: SpawnerClient, listener: Listener) -> None:
        start(client, 7, "echo out; exit 3")
        await listener.until(lambda: 7 in listener.ended)
        assert listener.calls == ["connected", "prepared 7", "started 7", "ended 7"]
        assert listener.started[7].pid > 1
        assert listener.ended[7].outcome.exit_code == 3
        assert os.read(listener.outputs[7], 100) == b"out\n"
        client.acknowledge(7)
        assert await client.list_tasks() == []

    lab.run(body)


def test_cancel_sent_right_after_the_start_is_not_lost(lab: Lab) -> None:
    async def body(client: SpawnerClient, listener: Listener) -> None:
        for seq in range(1, 21):
            start(client, seq, "sleep 300")
            client.cancel(seq)
        await listener.until(lambda: len(listener.ended) == 20)
        assert {e.outcome.status for e in listener.ended.values()} == {Status.CANCELLED}

    lab.run(body)


def test_start_of_a_known_seq_runs_nothing_and_is_answered(lab: Lab, place: Path) -> None:
    place.chmod(0o777)

    async def body(client: SpawnerClient, listener: Listener) -> None:
        script = f"mktemp {place}/XXXXXX; exit 5"
        start(client, 1, script)
        await listener.until(lambda: 1 in listener.ended)
        listener.ended.clear()
        start(client, 1, script)
        await listener.until(lambda: 1 in listener.ended)
        assert listener.ended[1].outcome.exit_code == 5

    lab.run(body)
    assert len(list(place.iterdir())) == 1


def test_a_later_client_lists_what_lives_and_what_ended_with_its_output(lab: Lab) -> None:
    async def first(client: SpawnerClient, listener: Listener) -> None:
        start(client, 1, "echo alive; sleep 300")
        start(client, 2, "echo dead; exit 9")
        await listener.until(lambda: 1 in listener.started and 2 in listener.ended)

    async def second(client: SpawnerClient, listener: Listener) -> None:
        tasks = await client.list_tasks()
        assert [task.seq for task, _ in tasks] == [1, 2]
        assert tasks[0][0].outcome is None
        outcome = tasks[1][0].outcome
        assert outcome is not None
        assert outcome.exit_code == 9
        assert listener.ended == {}
        for (_, output_fd), expected in zip(tasks, (b"alive\n", b"dead\n"), strict=True):
            assert output_fd is not None
            assert os.read(output_fd, 100) == expected
            os.close(output_fd)

    lab.run(first)
    lab.run(second)


def test_more_tasks_than_a_page_are_all_listed_once(lab: Lab) -> None:
    async def body(client: SpawnerClient, listener: Listener) -> None:
        for seq in range(1, 131):
            start(client, seq, "exec sleep 300")
        await listener.until(lambda: len(listener.started) == 130)
        tasks = await client.list_tasks()
        assert [task.seq for task, _ in tasks] == list(range(1, 131))
        for _, output_fd in tasks:
            assert output_fd is not None
            os.close(output_fd)

    lab.run(body)


def test_nothing_is_delivered_before_the_listener_has_taken_the_list_in(lab: Lab) -> None:
    async def first(client: SpawnerClient, listener: Listener) -> None:
        start(client, 1, "sleep 0.3")
        await listener.until(lambda: 1 in listener.started)

    async def main() -> None:
        listener = Listener()
        client = SpawnerClient(lab.socket_path, listener, software="test")

        async def wait_for_its_end() -> None:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    ((task, output_fd),) = await client.list_tasks()
                    assert output_fd is not None
                    os.close(output_fd)
                    if task.outcome is not None:
                        break
                    await asyncio.sleep(0.01)
            assert listener.calls == ["connected"]

        listener.hold = wait_for_its_end
        connection = asyncio.create_task(client.run())
        await listener.until(lambda: 1 in listener.ended)
        os.close(listener.outputs[1])
        connection.cancel()
        await asyncio.wait([connection])

    lab.run(first)
    asyncio.run(main())


def test_client_finds_the_standby_when_the_spawner_dies(lab: Lab) -> None:
    async def body(client: SpawnerClient, listener: Listener) -> None:
        start(client, 1, "sleep 1; exit 6")
        await listener.until(lambda: 1 in listener.started)
        pidfd.checked_kill(listener.welcomes[0].pid, signal.SIGKILL)
        await listener.until(lambda: len(listener.welcomes) == 2)
        assert listener.calls[:5] == [
            "connected", "prepared 1", "started 1", "lost", "connected",
        ]  # fmt: skip
        assert listener.welcomes[1].token == listener.welcomes[0].token
        assert listener.welcomes[1].generation == listener.welcomes[0].generation + 1
        await listener.until(lambda: 1 in listener.ended)
        assert listener.ended[1].outcome.exit_code == 6

    lab.run(body)


def test_without_a_connection_a_start_is_refused_and_leaks_no_descriptor(lab: Lab) -> None:
    async def main() -> None:
        client = SpawnerClient(lab.socket_path, Listener(), software="test")
        before = os.listdir("/proc/self/fd")
        with pytest.raises(SpawnerLostError):
            start(client, 1, "true")
        client.acknowledge(1)
        assert os.listdir("/proc/self/fd") == before

    asyncio.run(main())


def test_client_gives_up_when_no_spawner_answers(place: Path) -> None:
    async def main() -> None:
        client = SpawnerClient(place / "1.sock", Listener(), software="test", give_up_s=0.2)
        with pytest.raises(SpawnerLostError, match="cannot reach a spawner"):
            await client.run()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ProcessPlan(("x" * 131_072,), {}), "an argument takes 131072 bytes"),
        (ProcessPlan(("x",), {"V": "x" * 131_070}), "environment variable 'V' takes 131072 bytes"),
        (ProcessPlan(("x",), {f"V{n}": "x" * 100_000 for n in range(21)}), "the kernel's limit"),
        (ProcessPlan(("a\0b",), {}), "an argument holds a NUL"),
        (ProcessPlan(("\ud800",), {}), "an argument is not valid text"),
    ],
)
def test_what_the_kernel_would_not_execute_is_refused_before_the_start(
    plan: ProcessPlan, message: str
) -> None:
    with pytest.raises(RejectedError, match=message):
        pack_start(1, plan, Limits(), "process")


def test_the_largest_arguments_that_are_let_through_do_execute(lab: Lab) -> None:
    async def body(client: SpawnerClient, listener: Listener) -> None:
        environment = {f"V{number}": "x" * 131_000 for number in range(14)}
        plan = ProcessPlan(("/bin/true", "x" * 131_071), environment)
        client.start(pack_start(1, plan, Limits(), "process"))
        await listener.until(lambda: 1 in listener.ended)
        assert listener.ended[1].outcome.status is Status.SUCCESS, listener.ended[1].outcome

    lab.run(body)
