"""Whether a hostile task was contained, and by what: from how it ended, by a pure function."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from stockade.sandbox import capabilities
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome
from stockade.sandbox.profiles import WHOLE_VIEW, Profile, needs
from stockade.supervisor.cli.hostile import END, LIMITS, REACHED, Hostile

_NO_SUCH_COMMAND: Final = 127
_SHOWN: Final = 4


class Verdict(enum.StrEnum):
    """What became of a hostile task."""

    CONTAINED = "contained"
    NOT_CONTAINED = "NOT CONTAINED"
    NOT_ENFORCED = "not enforced"
    NOT_TRIED = "NOT TRIED"


FAILURES: Final = frozenset((Verdict.NOT_CONTAINED, Verdict.NOT_TRIED))


@dataclasses.dataclass(frozen=True, slots=True)
class Observed:
    """How a hostile task ended.

    Attributes:
        left: what of it was still there after its outcome was told.
    """

    outcome: Outcome
    output: str
    left: tuple[str, ...] = ()

    @property
    def reached(self) -> list[str]:
        """What it says that it brought about."""
        lines = self.output.splitlines()
        return [line.removeprefix(REACHED) for line in lines if line.startswith(REACHED)]


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """One line of the answer. ``evidence``: what contained it, or what it reached, or why not."""

    name: str
    tries: str
    verdict: Verdict
    evidence: str


def judge(task: Hostile, seen: Observed, profile: Profile, host: HostCapabilities) -> Proof:
    """What became of a task that ran in this profile on this host. Pure."""

    def proof(verdict: Verdict, evidence: str) -> Proof:
        return Proof(task.name, task.tries, verdict, evidence)

    untried = _untried(seen)
    if untried:
        return proof(Verdict.NOT_TRIED, untried)
    limits = dataclasses.replace(LIMITS, **task.limits)
    missing = {
        entry.feature: entry for entry in capabilities.missing(profile, limits, host, WHOLE_VIEW)
    }
    promised = {*needs(profile, WHOLE_VIEW), *(field.name for field in dataclasses.fields(Limits))}
    in_force = [name for name in task.held_by if name in promised and name not in missing]
    lacking = [missing[name] for name in task.held_by if name in missing]
    failures = _failures(task, seen)
    is_held = bool(in_force) or not task.held_by
    if not is_held and not task.has_coarser and lacking:
        return proof(Verdict.NOT_ENFORCED, f"{lacking[0].feature}: {lacking[0].why}")
    if failures:
        beyond = list(Profile).index(profile) < list(Profile).index(task.weakest)
        hint = f"; {profile} does not hold this, {task.weakest} does" if beyond else ""
        return proof(Verdict.NOT_CONTAINED, f"{failures}{hint}")
    if not is_held and not task.has_coarser:
        return proof(
            Verdict.NOT_ENFORCED,
            f"it reached nothing, but {profile} does not hold this, {task.weakest} does",
        )
    if task.ends in (ErrorCode.TIMEOUT, ErrorCode.OOM_KILLED):
        return proof(Verdict.CONTAINED, seen.outcome.reason)
    if not is_held:
        return proof(Verdict.CONTAINED, f"{lacking[0].instead} ({lacking[0].why})")
    names = f" ({', '.join(in_force)})" if in_force and task.by not in in_force else ""
    ended = f": {seen.outcome.reason}" if task.ends is not ErrorCode.NONE else ""
    return proof(Verdict.CONTAINED, task.by + names + ended)


def _untried(seen: Observed) -> str:
    """Why this says nothing about the host; empty when it does."""
    outcome = seen.outcome
    if outcome.error_code in (ErrorCode.SPAWN_FAILED, ErrorCode.WORKER_LOST):
        return outcome.reason
    if outcome.exit_code == _NO_SUCH_COMMAND:
        output = printable(" ".join(seen.output.split())[:200])
        return output or "a program that it needs is not there"
    return ""


def _failures(task: Hostile, seen: Observed) -> str:
    """What was not contained; empty when all was."""
    outcome = seen.outcome
    if seen.reached:
        more = len(seen.reached) - _SHOWN
        shown = [*seen.reached[:_SHOWN], *([f"{more} more"] if more > 0 else [])]
        return printable(f"reached {', '.join(shown)}")
    if seen.left:
        return f"left {', '.join(seen.left)}"
    if outcome.error_code is not task.ends:
        told = outcome.reason or outcome.status
        output = " ".join(seen.output.split())[-200:]
        return printable(f"ended otherwise than it should: {told} {output}".rstrip())
    if task.ends is ErrorCode.NONE and seen.output.splitlines()[-1:] != [END]:
        return "it did not come to its end"
    return ""


def printable(text: str) -> str:
    """The text with nothing in it that drives a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
