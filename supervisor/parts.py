"""The supervisor's parts, made and joined; nothing of them runs yet."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from stockade.supervisor.admission import Admission
from stockade.supervisor.config import Config
from stockade.supervisor.control import Control
from stockade.supervisor.equipment import Equipment
from stockade.supervisor.executor import Executor
from stockade.supervisor.heartbeat import Heartbeat
from stockade.supervisor.intake import Intake, Schedulers
from stockade.supervisor.journal import Journal
from stockade.supervisor.links.link import Link
from stockade.supervisor.links.running import make_links, registering
from stockade.supervisor.metrics import Metrics
from stockade.supervisor.outages import Outages
from stockade.supervisor.output import OutputStore
from stockade.supervisor.planning import Planner
from stockade.supervisor.reloader import Reloader
from stockade.supervisor.reporter import Reporter
from stockade.supervisor.slots import SpawnerClient, Wanted


class Parts:
    """One life's.

    Attributes:
        links: the running ones, by name.
        heartbeats: one for each link that registers with a scheduler.

    Args:
        wanted: what the spawner should be.
        life: names this life to whoever waits for the next one.
    """

    def __init__(
        self,
        config: Config,
        equipment: Equipment,
        journal: Journal,
        planner: Planner,
        *,
        wanted: Wanted,
        reloader: Reloader,
        life: str,
    ) -> None:
        self.config = config
        self.journal = journal
        self._reloader = reloader
        self._life = life
        outages = Outages()
        known: dict[str, Link] = {}
        self.reporter = Reporter(known, journal, config, outages)
        self.output = OutputStore(equipment.places.output, config.limits.output_max)
        self.admission = Admission(config.worker)
        # Before anything that an earlier life left in line can start.
        self.admission.look(lambda: None)
        self.executor = Executor(
            journal=journal,
            output=self.output,
            reporter=self.reporter,
            planner=planner,
            admission=self.admission,
            max_concurrency=config.worker.max_concurrency,
            excerpt_bytes=config.report.excerpt,
        )
        self.client = self.executor.spawner.client = SpawnerClient(
            equipment.spawner_socket,
            self.executor.spawner,
            software=importlib.metadata.version("stockade"),
            wanted=wanted,
        )
        intake = Intake(
            journal=journal,
            executor=self.executor,
            reporter=self.reporter,
            schedulers={
                name: Schedulers(link.scheduler or "", frozenset(link.allow_schedulers))
                for name, link in config.links.items()
            },
        )
        self.links = make_links(
            config,
            intake,
            metrics=lambda: metrics.text(),  # noqa: PLW0108 -- they come after the links
            credentials=equipment.credentials,
            task_uids=(
                range(config.worker.uid_min, config.worker.uid_max + 1)
                if equipment.as_root
                else None
            ),
        )
        known.update(self.links)
        self.heartbeats = {
            link.name: Heartbeat(
                link,
                config,
                self.executor.load,
                outages,
                others=[other for other in self.links.values() if other is not link],
            )
            for link in registering(config, self.links)
        }
        metrics = Metrics(
            executor=self.executor,
            journal=journal,
            reporter=self.reporter,
            heartbeats=self.heartbeats,
            slots_set_aside=lambda: self.client.set_aside.count,
            max_concurrency=config.worker.max_concurrency,
        )
        self.control = Control(
            journal=journal,
            executor=self.executor,
            intake=intake,
            output=self.output,
            reporter=self.reporter,
            status=self._status,
            drain=self.drain,
            reload=reloader.ask,
        )

    def drain(self) -> None:
        """Tells schedulers to send nothing more; what arrives all the same still runs."""
        self.executor.drain()
        self._beat()

    def pressure_changed(self) -> None:
        """Starts what waited for the end of the host's pressure, and tells schedulers."""
        self.executor.turns.go_on()
        self._beat()

    def _beat(self) -> None:
        for heartbeat in self.heartbeats.values():
            heartbeat.beat_now()

    def counts(self) -> str:
        """How many tasks there are, in words."""
        running = self.executor.load().running_tasks
        undelivered, _ = self.reporter.undelivered()
        waiting = self.executor.turns.waiting
        return f"{running} running, {waiting} queued, {undelivered} undelivered"

    def _status(self) -> dict[str, Any]:
        undelivered, age_s = self.reporter.undelivered()
        return {
            "worker_id": self.config.worker.id,
            "version": importlib.metadata.version("stockade"),
            "pid": os.getpid(),
            "life": self._life,
            "reload_error": self._reloader.error,
            "links": {
                name: {
                    "listen": str(link.bound) if link.bound else None,
                    "scheduler": link.scheduler or None,
                    "registered": name in self.heartbeats and self.heartbeats[name].registered,
                }
                for name, link in self.links.items()
            },
            "max_concurrency": self.config.worker.max_concurrency,
            "pressure": self.executor.turns.pressure,
            "undelivered_reports": undelivered,
            "undelivered_age_s": age_s,
            "elders": [
                {
                    "generation": elder.generation,
                    "pid": elder.pid,
                    "tasks": len(elder.seqs & self.executor.tasks.keys()),
                }
                for elder in self.client.elders
            ],
            "slots_set_aside": self.client.set_aside.count,
            "set_aside": list(self.client.set_aside.slots),
        }
