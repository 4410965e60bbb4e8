"""What can go wrong in the embedded scheduler."""

from __future__ import annotations

from stockade.platform.errors import StockadeError


class SchedulerError(StockadeError):
    """Root of the embedded scheduler's errors."""


class SettingsError(SchedulerError):
    """The scheduler was told something it cannot do. Permanent: exit status 78 (EX_CONFIG)."""


class ListenError(SchedulerError):
    """The address cannot be listened on, for example because its port is in use."""


class StoreError(SchedulerError):
    """The store cannot be opened, read or written; what was asked did not happen."""


class RequestError(SchedulerError):
    """A request's body or query is not what the API takes."""


class NotFoundError(SchedulerError):
    """There is no task, instance or worker of this name."""


class ConflictError(SchedulerError):
    """The request is well formed, but the task or the workers are not in a state for it."""


class InvalidTransitionError(SchedulerError):
    """An instance cannot take this event in this state: a fault in the scheduler itself."""
