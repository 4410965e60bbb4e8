"""The same test over each link: ``@over_both_links`` runs it with each kind of scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_scheduler import GrpcRecordingScheduler
from recording_scheduler import RecordingScheduler

SCHEDULERS: dict[str, type[RecordingScheduler]] = {
    "http": RecordingScheduler,
    "grpc": GrpcRecordingScheduler,
}

over_both_links = pytest.mark.parametrize("scheduler", SCHEDULERS, indirect=True)


def make_scheduler(link: str, **settings: Any) -> RecordingScheduler:
    """A recording scheduler that speaks over this link."""
    return SCHEDULERS[link](**settings)
