"""A dispatch as the worker keeps it: checked, normalised, independent of the link it came by."""

from __future__ import annotations

from typing import Any

import msgspec

from stockade.supervisor.wire.messages import HttpRequest


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """One task as accepted. Journalled as JSON, so every field has a default but the id.

    Attributes:
        instance_id: opaque text of 1 to 256 characters without NUL; never a file name.
        scheduler: URL (or address) that gets the reports.
        link: the link it came by and is reported over: ``http``, ``grpc``, ``nats``.
        task_type: trimmed and lower case; may be unknown.
        timeout_s: wish in seconds; None means the worker's default.
        limits: raw wishes by limit name, of any type that JSON has; checked when the task is
            planned, and not before: what was accepted must come back from the journal.
    """

    instance_id: str
    scheduler: str = ""
    link: str = "http"
    task_id: int = 0
    task_type: str = ""
    payload: str = ""
    image: str = ""
    timeout_s: float | None = None
    retry_count: int = 0
    shard_no: int = 0
    shard_total: int = 0
    idempotency_key: str = ""
    profile: str | None = None
    limits: dict[str, Any] = {}
    http: HttpRequest | None = None
    files: dict[str, str] = {}
