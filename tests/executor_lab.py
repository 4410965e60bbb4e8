"""An executor and an intake in this process, with a real journal, output store and spawner.

Only the reporter is a stand-in, which records what it is told.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from worker_process import eventually, make_place, processes_that_name

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Outcome
from stockade.sandbox.profiles import Profile
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.spawner_start import start_spawner
from stockade.supervisor.admission import Admission
from stockade.supervisor.config_load import load
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.executor import Executor
from stockade.supervisor.intake import Intake, Schedulers
from stockade.supervisor.journal import Journal, Row
from stockade.supervisor.limits import UNLIMITED
from stockade.supervisor.output import OutputStore
from stockade.supervisor.planning import Planner
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient
from stockade.supervisor.task_types.base import TaskType
from stockade.supervisor.task_types.http import HttpTask
from stockade.supervisor.task_types.http_access import DENIED_BY_DEFAULT, Access
from stockade.supervisor.task_types.shell import ShellTask
from stockade.supervisor.wire.messages import ExecuteRequest

DEADLINE_S = 30.0
SCHEDULER = "http://scheduler.test"


class RecordingReporter:
    """What the executor and the intake told, in order, by instance id."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}
        self.rows: dict[str, Row] = {}
        self.order: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def accepted(self, row: Row) -> None:
        self._note(row, "accepted")

    def running(self, row: Row) -> None:
        self._note(row, "running")

    def finished(self, row: Row) -> None:
        assert row.outcome is not None
        self.rows[row.dispatch.instance_id] = row
        self._note(row, row.outcome.status.value)

    def _note(self, row: Row, what: str) -> None:
        self.told.setdefault(row.dispatch.instance_id, []).append(what)
        self.order.append((row.dispatch.instance_id, what))
        self.changed.set()

    async def until(self, done: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def outcome(self, instance_id: str) -> Outcome:
        """How the task ended; waits for it."""
        await self.until(lambda: instance_id in self.rows)
        outcome = self.rows[instance_id].outcome
        assert outcome is not None
        return outcome


class Life:
    """One life of a supervisor: ends without a word, as a crash does, when the body returns."""

    def __init__(
        self,
        lab: ExecutorLab,
        journal: Journal,
        max_concurrency: int,
        types: Sequence[TaskType],
        worker: dict[str, str],
    ) -> None:
        self.journal = journal
        self.reporter = RecordingReporter()
        self.output = OutputStore(lab.place / "output", Limits().output_max)
        self.http = HttpTask(
            body_max=1000,
            redirects_max=3,
            connect_timeout_s=10.0,
            access=Access((), DENIED_BY_DEFAULT),
        )
        shell = ShellTask(path="/usr/bin:/bin", lang="C.UTF-8", extra={})
        self.types: dict[str, TaskType] = {made.name: made for made in (shell, self.http, *types)}
        reporter = cast(Reporter, self.reporter)
        keys = {f"worker.{name}": value for name, value in worker.items()}
        # Whatever else this machine does: no test waits for it unless it asks to.
        keys = {"worker.pressure_memory": "", **keys}
        self.admission = Admission(load(None, {}, keys).config.worker)
        self.executor = Executor(
            journal=journal,
            output=self.output,
            reporter=reporter,
            planner=Planner(
                limits=Limits(timeout_stop=1.0),
                limits_max=UNLIMITED,
                profile="process",
                unavailable={},
                task_types=self.types,
            ),
            admission=self.admission,
            max_concurrency=max_concurrency,
            excerpt_bytes=1024,
        )
        self.intake = Intake(
            journal=journal,
            executor=self.executor,
            reporter=reporter,
            schedulers={"http": Schedulers(SCHEDULER, frozenset({"http://other.test"}))},
        )
        spawner = self.executor.spawner
        spawner.client = SpawnerClient(lab.socket_path, spawner, software="test")

    async def dispatch(self, instance_id: str, payload: str, **fields: Any) -> None:
        request = ExecuteRequest(
            schedule_instance_id=instance_id,
            payload=payload,
            **{"task_type": "shell", **fields},
        )
        await self.intake.execute(request, "http")


class ExecutorLab:
    """Places and a spawner; as many lives as wanted, one after the other."""

    def __init__(self) -> None:
        self.place = make_place()
        self.settings = SpawnerSettings(
            worker_id=f"test-{secrets.token_hex(6)}",
            runtime_dir=str(self.place / "run"),
            state_dir=str(self.place / "state"),
            supervisor_uid=os.geteuid(),
            supervisor_gid=os.getegid(),
            uid_min=0x70030000,
            profile=Profile.PROCESS,
            uid_max=0x70030FFF,
        )
        self.start_spawner()

    def start_spawner(self) -> None:
        self.socket_path = Path(start_spawner(self.settings).socket_path)

    def spawners(self) -> list[int]:
        return processes_that_name(f'"runtime_dir": "{self.settings.runtime_dir}"')

    def live(
        self,
        body: Callable[[Life], Awaitable[None]],
        *,
        max_concurrency: int = 4,
        types: Sequence[TaskType] = (),
        **worker: str,
    ) -> None:
        """A life: recovers, connects, runs ``body``, crashes.

        Args:
            types: task types besides the built-in ones.
            worker: keys of [worker].
        """

        async def main() -> None:
            journal = await Journal.open(self.place / "journal.db")
            life = Life(self, journal, max_concurrency, types, worker)
            assert life.executor.spawner.client is not None
            life.executor.recover(await journal.unfinished())
            connection = asyncio.create_task(life.executor.spawner.client.run())
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await life.executor.spawner.connected.wait()
                await body(life)
            finally:
                # Before the loop cancels what the executor has under way.
                connection.cancel()
                await asyncio.wait([connection])
                await journal.close()

        asyncio.run(main())

    def with_journal(self, body: Callable[[Journal], Awaitable[None]]) -> None:
        """Do something to the journal between two lives."""

        async def main() -> None:
            journal = await Journal.open(self.place / "journal.db")
            await body(journal)
            await journal.close()

        asyncio.run(main())

    def close(self) -> None:
        """End all tasks and the spawner, and remove the directories."""

        async def end(life: Life) -> None:
            await life.executor.stop("cancelled: the test is over")
            for task in list(life.executor.tasks.values()):
                life.executor.cancel(task, "cancelled: the test is over")
            await life.executor.idle()
            assert life.executor.spawner.client is not None
            assert await life.executor.spawner.client.list_tasks() == []
            life.executor.spawner.client.finish()

        if self.spawners():
            self.live(end)
        eventually(lambda: not self.spawners())
        shutil.rmtree(self.place)


def shell(instance_id: str, payload: str) -> Dispatch:
    """A dispatch as the journal holds it."""
    return Dispatch(
        instance_id=instance_id, scheduler=SCHEDULER, task_type="shell", payload=payload
    )
