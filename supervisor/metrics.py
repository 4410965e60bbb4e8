"""What ``/metrics`` tells, as Prometheus text: read from the parts when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stockade.supervisor.executor import Executor
from stockade.supervisor.heartbeat import Heartbeat
from stockade.supervisor.journal import Journal
from stockade.supervisor.reporter import Reporter


class Metrics(Collector):
    """One worker's metrics; each instance has a registry of its own."""

    def __init__(
        self,
        *,
        executor: Executor,
        journal: Journal,
        reporter: Reporter,
        heartbeats: Mapping[str, Heartbeat],
        slots_set_aside: Callable[[], int],
        max_concurrency: int,
    ) -> None:
        self._executor = executor
        self._journal = journal
        self._reporter = reporter
        self._heartbeats = heartbeats
        self._slots_set_aside = slots_set_aside
        self._max_concurrency = max_concurrency
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        load = self._executor.load()
        undelivered, age_s = self._reporter.undelivered()
        running = load.running_tasks
        for name, text, value in (
            ("max_concurrency", "Most tasks at once.", self._max_concurrency),
            ("running_tasks", "Tasks that run.", running),
            ("queued_tasks", "Tasks that wait for a place.", self._executor.turns.waiting),
            ("current_load", "The load that heartbeats tell.", load.current_load),
            ("draining", "1 while draining.", int(self._executor.draining)),
            (
                "under_pressure",
                "1 while pressure holds starts up.",
                int(bool(self._executor.turns.pressure)),
            ),
            ("journal_writable", "1 while it can be written.", int(self._journal.fault is None)),
            ("slots_set_aside", "Slots lost to what cannot be killed.", self._slots_set_aside()),
            ("undelivered_reports", "Terminal reports that are owed.", undelivered),
            ("undelivered_report_age_seconds", "Age of the oldest of them.", age_s),
        ):
            yield GaugeMetricFamily(f"stockade_{name}", text, value=value)
        registered = GaugeMetricFamily(
            "stockade_registered", "1 while the link's scheduler knows us.", labels=("link",)
        )
        for link, heartbeat in self._heartbeats.items():
            registered.add_metric((link,), int(heartbeat.registered))
        yield registered
        ended = CounterMetricFamily(
            "stockade_tasks_ended",
            "Tasks that ended, by how.",
            labels=("status", "error_code"),
        )
        for (status, error_code), count in self._executor.ended.items():
            ended.add_metric((status, error_code), count)
        yield ended
