"""Errors of the supervisor layer."""

from __future__ import annotations

import enum

from stockade.platform.errors import StockadeError


class ConfigError(StockadeError):
    """The configuration cannot be used. Permanent: the process ends with status 78 (EX_CONFIG)."""


class Rejection(enum.Enum):
    """Why a dispatch is not accepted; each link has one table from these to its own codes."""

    INVALID = "invalid"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"


class RejectedError(StockadeError):
    """A dispatch, cancel or operator's request is refused.

    Attributes:
        rejection: the kind, from which a link derives its own code.
    """

    def __init__(self, rejection: Rejection, message: str) -> None:
        super().__init__(message)
        self.rejection = rejection


class InvalidTransitionError(StockadeError):
    """A task cannot take this event in this state: a fault in Stockade itself."""


class JournalError(StockadeError):
    """The journal cannot be read or written; nothing that needs it is acknowledged."""


class SpawnerLostError(StockadeError):
    """The connection to the spawner is gone; the caller waits for the next one."""
