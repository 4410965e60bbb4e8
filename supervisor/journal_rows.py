"""What the journal holds of one task, and how it is written and read back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from stockade.sandbox.outcome import Outcome
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.states import State

# A longer dispatch is kept apart from its row, so that changing a state never rewrites it.
INLINE_BYTES: Final = 2048
SUMMARY_CHARACTERS: Final = 1024
# JSON may begin with white space, and a summary does: a row that lost its whole dispatch is told
# from one that never had more.
_SUMMARY: Final = b" "

_ENCODER: Final = msgspec.json.Encoder()
_DISPATCH: Final = msgspec.json.Decoder(Dispatch)
_OUTCOME: Final = msgspec.json.Decoder(Outcome)

COLUMNS: Final = (
    "seq, state, accepted_at, started_at, finished_at, closed_at, outcome, excerpt, attempts,"
    " cancelled, error, stored_bytes, dispatch"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One task as journalled.

    Attributes:
        seq: the row number; names the task's output and record, and is never used again.
        dispatch: whole from ``row``, ``unfinished`` and a new ``accept``; elsewhere long texts in
            it are cut to 1,024 characters and ``files``, ``limits`` and ``http`` may be missing.
        accepted_at: Unix time in seconds, like the next two.
        closed_at: when it was delivered or dropped, by the journal's clock.
        outcome: None until the task is finished.
        attempts: how often a delivery was tried, as far as the reporter told.
        cancelled: a cancel was asked for; it outlives a crash.
        error: why the scheduler refused the report, for a dead letter.
        stored_bytes: what the task's output takes on disk.
        is_cut: the dispatch is not whole, and must not be run.
    """

    seq: int
    dispatch: Dispatch
    state: State
    accepted_at: float
    started_at: float | None = None
    finished_at: float | None = None
    closed_at: float | None = None
    outcome: Outcome | None = None
    excerpt: str = ""
    attempts: int = 0
    cancelled: bool = False
    error: str = ""
    stored_bytes: int = 0
    is_cut: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to a dispatch.

    Attributes:
        row: the new row, or the one that a duplicate finds.
        is_new: False for a duplicate, which never runs.
        cancelled_before: a cancel for this id came before the dispatch; it must not start.
    """

    row: Row
    is_new: bool
    cancelled_before: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A dispatch ready to be written: ``inline`` in its row, ``whole`` apart when it is long."""

    dispatch: Dispatch
    inline: bytes
    whole: bytes | None


def encode_dispatch(dispatch: Dispatch) -> Encoded:
    """The dispatch as JSON, and as a short JSON when it is long."""
    whole = _ENCODER.encode(dispatch)
    if len(whole) <= INLINE_BYTES:
        return Encoded(dispatch, whole, None)
    return Encoded(dispatch, _SUMMARY + _ENCODER.encode(summarise(dispatch)), whole)


def summarise(dispatch: Dispatch) -> Dispatch:
    """The dispatch with long texts cut and without what can be large. The id stays whole."""
    cut: dict[str, Any] = {
        name: value[:SUMMARY_CHARACTERS]
        for name, value in msgspec.structs.asdict(dispatch).items()
        if isinstance(value, str) and name not in {"instance_id", "scheduler"}
    }
    return msgspec.structs.replace(dispatch, **cut, limits={}, http=None, files={})


def encode_outcome(outcome: Outcome) -> bytes:
    """The outcome as JSON."""
    try:
        return _ENCODER.encode(outcome)
    except UnicodeEncodeError:
        # A reason that quotes a file name can hold what is not text; the outcome must be kept.
        return _ENCODER.encode(dataclasses.replace(outcome, reason=clean_text(outcome.reason)))


def clean_text(text: str) -> str:
    """The text as SQLite can hold it: lone surrogates become question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


def decode_row(values: Sequence[Any], whole: bytes | None = None) -> Row:
    """The row that a query for COLUMNS gave, with the ``whole`` dispatch when it was fetched too.

    Raises:
        msgspec.MsgspecError: what is stored is not what we write.
        ValueError: the state is not one of ours.
    """
    outcome = values[6]
    dispatch, is_whole = _decode_dispatch(values[12], whole)
    return Row(
        seq=values[0],
        state=State(values[1]),
        accepted_at=values[2],
        started_at=values[3],
        finished_at=values[4],
        closed_at=values[5],
        outcome=None if outcome is None else _OUTCOME.decode(outcome),
        excerpt=values[7],
        attempts=values[8],
        cancelled=bool(values[9]),
        error=values[10],
        stored_bytes=values[11],
        dispatch=dispatch,
        is_cut=not is_whole,
    )


def _decode_dispatch(inline: bytes, whole: bytes | None) -> tuple[Dispatch, bool]:
    """The dispatch, and whether it is whole: a whole one that is damaged is as good as lost."""
    if whole is not None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            return _DISPATCH.decode(whole), True
    return _DISPATCH.decode(inline), not inline.startswith(_SUMMARY)


def quoted(states: frozenset[State]) -> str:
    """The states as a list for SQL."""
    return ", ".join(f"'{state}'" for state in sorted(states))
