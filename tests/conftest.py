"""Fixtures that end-to-end tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from both_links import make_scheduler
from recording_scheduler import RecordingScheduler
from worker_process import WorkerProcess, make_place

pytest_plugins = ("lab.needs", "leaks")


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary directory that tasks of other uids can pass through."""
    directory = make_place()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def scheduler(request: pytest.FixtureRequest) -> Iterator[RecordingScheduler]:
    """Speaks HTTP, or in tests that are marked ``over_both_links`` what the test is run with."""
    with make_scheduler(getattr(request, "param", "http")) as recording:
        yield recording


@pytest.fixture
def make_worker(scheduler: RecordingScheduler) -> Iterator[Callable[..., WorkerProcess]]:
    """Makes started workers that report to ``scheduler``; stops them and checks for leaks."""
    made: list[WorkerProcess] = []

    def make(**settings: Any) -> WorkerProcess:
        worker = WorkerProcess(scheduler.url, **{"link": scheduler.link, **settings})
        made.append(worker)
        return worker.start()

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def worker(make_worker: Callable[..., WorkerProcess]) -> WorkerProcess:
    """A started worker with the defaults."""
    return make_worker()
