"""A task's record on disk: what whoever comes next needs to know about it.

``runtime_dir/spawner/record/SEQ``, appended to by the spawner and by the launcher, one write a
line, each line a word and its fields:

    slot JSON                       the spawner, before the start: see SlotRecord
    started PID MONOTONIC_NS UNIX_NS                        the launcher, before the task's exec
    failed STEP ERRNO                                       the launcher: the task never ran
    cause CAUSE TEXT                the spawner, before it terminates or kills: see Cause
    ended STATUS UTIME_US STIME_US MAXRSS_KB INBLOCK OUBLOCK MONOTONIC_NS UNIX_NS
    outcome JSON                    the spawner, when nothing of the task lives
    owner N                         a later spawner that took the task over: its generation

A record is removed when the supervisor has acknowledged the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
from collections.abc import Container, Iterator
from typing import Final, Self, TypeVar

import msgspec

from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Outcome, reason_of

log = logging.getLogger(__name__)

# Ends the name of a record that could not be read, kept for a person to look at.
DAMAGED: Final = ".damaged"

_USUAL_BYTES: Final = 8192
_MOST_BYTES: Final = 1 << 20


class Cause(enum.StrEnum):
    """Why the spawner ended a task; the first one stands."""

    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    MEMORY = "memory"
    START_DEADLINE = "start_deadline"
    LOST = "lost"


@dataclasses.dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a later spawner needs to find, kill and judge the task.

    Attributes:
        launcher_pid: in the spawner's pid namespace.
        launcher_start: its start time in ticks since boot (proc(5) field 22): together with the
            boot id it tells the launcher from a later process of the same pid.
        cgroup: absolute path of the slot's group, or None without a tree.
        uid: the slot's own uid, or None without root.
        container: the name of the task's container; None for a program of its own.
    """

    seq: int
    slot: str
    boot_id: str
    launcher_pid: int
    launcher_start: int
    cgroup: str | None
    uid: int | None
    profile: str
    limits: Limits
    own_stdio: bool
    container: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StartedLine:
    """The task's main process exists. Times in seconds."""

    pid: int
    monotonic: float
    unix: float


@dataclasses.dataclass(frozen=True, slots=True)
class FailedLine:
    """A step before the task's program failed."""

    step: str
    errno: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndedLine:
    """The main process's end: its wait status and rusage, its waited-for children included."""

    status: int
    user_s: float
    system_s: float
    maxrss_bytes: int
    read_bytes: int
    write_bytes: int
    monotonic: float
    unix: float


@dataclasses.dataclass(slots=True)
class Record:
    """All that a record's file says so far."""

    slot: SlotRecord | None = None
    started: StartedLine | None = None
    failed: FailedLine | None = None
    cause: Cause | None = None
    cause_text: str = ""
    ended: EndedLine | None = None
    outcome: Outcome | None = None
    owner: int | None = None

    @property
    def generation(self) -> int | None:
        """Of the spawner that has the task; None when its maker died before it said so."""
        if self.owner is not None or self.slot is None:
            return self.owner
        return generation_of(self.slot.slot)

    @property
    def never_started(self) -> bool:
        """Whether nothing was written of the task's start: then its program never ran."""
        return (self.started, self.failed, self.cause, self.ended, self.outcome) == (None,) * 5


Decoded = TypeVar("Decoded")
_ENCODER: Final = msgspec.json.Encoder()
_SLOT: Final = msgspec.json.Decoder(SlotRecord)
_OUTCOME: Final = msgspec.json.Decoder(Outcome)


def generation_of(slot: str) -> int:
    """Of the spawner that made the slot called ``N-K``.

    Raises:
        ValueError: no spawner gives such a name.
    """
    return int(slot.partition("-")[0])


def parse(content: bytes) -> Record:
    """What the lines say. A last line without its newline (power loss) is not taken.

    Raises:
        ValueError: a complete line is not one of ours.
    """
    record = Record()
    _take(record, content)
    return record


def _take(record: Record, content: bytes) -> int:
    """Adds what complete lines say; how many bytes they are."""
    lines = content.split(b"\n")
    for line in lines[:-1]:
        word, _, rest = line.decode("utf-8", "replace").partition(" ")
        match word:
            case "slot":
                record.slot = _decoded(_SLOT, rest)
            case "started":
                pid, monotonic_ns, unix_ns = map(int, rest.split())
                record.started = StartedLine(pid, monotonic_ns / 1e9, unix_ns / 1e9)
            case "failed":
                step, number = rest.split()
                record.failed = FailedLine(step, int(number))
            case "cause":
                # The first cause stands, whoever wrote a second one after a takeover.
                if record.cause is None:
                    cause, _, record.cause_text = rest.partition(" ")
                    record.cause = Cause(cause)
            case "ended":
                record.ended = _ended(rest)
            case "owner":
                record.owner = int(rest)
            case "outcome":
                record.outcome = _decoded(_OUTCOME, rest)
            case _:
                raise ValueError(f"cannot read a record: unknown line {line[:80]!r}")
    return len(content) - len(lines[-1])


def _decoded(decoder: msgspec.json.Decoder[Decoded], text: str) -> Decoded:
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"cannot read a record: {error}") from error


def _ended(rest: str) -> EndedLine:
    status, user_us, system_us, maxrss_kb, inblock, oublock, monotonic_ns, unix_ns = map(
        int, rest.split()
    )
    return EndedLine(
        status=status,
        user_s=user_us / 1e6,
        system_s=system_us / 1e6,
        maxrss_bytes=maxrss_kb * 1024,
        read_bytes=inblock * 512,
        write_bytes=oublock * 512,
        monotonic=monotonic_ns / 1e9,
        unix=unix_ns / 1e9,
    )


class RecordFile:
    """One record, open for appending and reading."""

    def __init__(self, directory_fd: int, seq: int, flags: int) -> None:
        self.seq = seq
        self._directory_fd = directory_fd
        # What was read so far. Lines are only ever added.
        self._record = Record()
        self._offset = 0
        self.fd = os.open(
            str(seq), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600,
            dir_fd=directory_fd,
        )  # fmt: skip

    @classmethod
    def made(cls, directory_fd: int, slot: SlotRecord) -> Self:
        """A new record, of the task in ``slot``.

        Raises:
            FileExistsError: this seq has one: it must not be started again.
            OSError: it cannot be made or written, and is not there.
        """
        record = cls(directory_fd, slot.seq, os.O_CREAT | os.O_EXCL)
        try:
            record._append("slot", _ENCODER.encode(slot).decode())
        except OSError:
            record.remove()
            raise
        return record

    @classmethod
    def open(cls, directory_fd: int, seq: int) -> Self:
        """The record that an earlier spawner made."""
        return cls(directory_fd, seq, 0)

    def read(self) -> Record:
        """What it says now; always the same object, which later reads add to."""
        content = os.pread(self.fd, _USUAL_BYTES, self._offset)
        if len(content) == _USUAL_BYTES:
            content += os.pread(self.fd, _MOST_BYTES, self._offset + len(content))
        if content:
            self._offset += _take(self._record, content)
        return self._record

    # What this process acts on whether it can be written or not. Where it cannot, another spawner
    # will not know of it.

    def append_cause(self, cause: Cause, text: str) -> None:
        text = reason_of(text)
        if self._record.cause is None:
            self._record.cause, self._record.cause_text = cause, text
        self._append_if_possible("cause", f"{cause} {text}".rstrip())

    def append_outcome(self, outcome: Outcome) -> None:
        self._append_if_possible("outcome", _ENCODER.encode(outcome).decode())

    def append_owner(self, generation: int) -> None:
        self._append_if_possible("owner", str(generation))

    def _append_if_possible(self, word: str, rest: str) -> None:
        try:
            self._append(word, rest)
        except OSError as error:
            log.error("record %d lacks its line %r: %s", self.seq, word, error)

    def _append(self, word: str, rest: str) -> None:
        line = f"{word} {rest}\n".encode()
        written = os.write(self.fd, line)
        if written != len(line):
            raise OSError(f"cannot write record {self.seq}: {written} of {len(line)} bytes written")

    def close(self) -> None:
        os.close(self.fd)

    def remove(self) -> None:
        """Closes and deletes it. It may be gone already, as what cleans up /tmp takes old files."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(str(self.seq), dir_fd=self._directory_fd)


def recorded_slots(directory_fd: int, but: Container[int]) -> Iterator[SlotRecord]:
    """The slots of every record in the directory that can be read, without those ``but``."""
    for name in os.listdir(directory_fd):
        if name.endswith(DAMAGED) or int(name) in but:
            continue
        with contextlib.suppress(OSError, ValueError):
            record = RecordFile.open(directory_fd, int(name))
            try:
                found = record.read().slot
            finally:
                record.close()
            if found is not None:
                yield found
