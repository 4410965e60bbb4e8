"""The supervisor's and the spawner's protocol: every message, both ends' types.

Transport: one SOCK_SEQPACKET Unix socket, ``runtime_dir/spawner/N.sock``. A message is one packet:
a JSON object ``{"type": NAME, ...fields}`` of at most 64 KiB, with at most 200 descriptors.

The supervisor speaks first: Hello, answered by Welcome or Refused. Then, in any order:

    supervisor -> spawner                     spawner -> supervisor
    Start (seq, descriptors)                  Prepared (descriptor), Started, Ended; or Ended alone
                                              or Unstarted: nothing of it ran, send it again
    Cancel (seq)                              (nothing: Ended follows)
    Acknowledge (seq)                         (nothing: the record is removed)
    List (after)                              Listed (page of tasks, with output pipes)
    Finish ()                                 (nothing: the spawner ends when nothing is left)
    Renew (tuning)                            Renewed
                                              SetAside, after Welcome and when it grows
    Job ()                                    JobTold

One supervisor at a time: a second connection that says Hello replaces the first. Whatever the
supervisor did not acknowledge is told again after the next Hello, on request by List.
A Start for a seq that is known is not run again: it is answered as List would.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import Outcome

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 64 * 1024
MAX_DESCRIPTORS: Final = 200
LIST_PAGE: Final = 100


def _tag(class_name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name).lower()


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=_tag):
    @property
    def type(self) -> str:
        """The message's name on the wire."""
        return str(self.__struct_config__.tag)


class Hello(_Message, frozen=True):
    """First message of a supervisor. ``software`` is its version, for the log."""

    version: int
    software: str


class Welcome(_Message, frozen=True):
    """The spawner's answer to Hello.

    Attributes:
        code: fingerprint of the code that it runs; see installed.py.
        tuning: what it was told to start with; see SpawnerSettings.
        generation: N of N.sock.
        token: names the record directory's life (boot id and a random part). A supervisor that
            journalled another token must take records that are absent for lost, not for unstarted.
        tasks: how many tasks List will tell.
        degraded: what this host cannot enforce, for every task.
        elders: generations of spawners that still finish their own tasks, each at N.old. What they
            have is not in this one's List: ask them, too, before taking a task for unknown.
    """

    version: int
    code: str
    tuning: str
    pid: int
    generation: int
    token: str
    tasks: int
    degraded: tuple[str, ...]
    elders: tuple[int, ...]


class Container(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A container to run in place of a program.

    The Start's arguments are then the task's own words for the engine: flags, which the spawner
    checks, and the container's command. There may be none.

    Attributes:
        image: as a registry names it.
        instance_id: any text; names the container, made safe.
    """

    image: str
    instance_id: str


class Start(_Message, frozen=True):
    """Run one task in a fresh slot.

    Descriptors, in order: a sealed memfd with the ``argc`` argument strings and then the ``envc``
    environment strings (``K=V``), each ended by NUL; one sealed memfd for each of ``files``; and,
    when ``own_stdio``, three descriptors that become the task's 0, 1 and 2 (else 0 is /dev/null and
    1 and 2 are the slot's output pipe).

    Attributes:
        seq: the journal's row number; names the record.
        files: names, without a slash, of files to put in the work directory, 0600, the task's.
        directory: absolute working directory, or None for the slot's work directory. HOME, TMPDIR
            and PWD of the task are the slot's work directory either way and set by the spawner.
        profile: a profiles.Profile.
        container: None for a program.
    """

    seq: int
    argc: int
    envc: int
    files: tuple[str, ...]
    own_stdio: bool
    directory: str | None
    profile: str
    limits: Limits
    container: Container | None = None


class Prepared(_Message, frozen=True):
    """The task is being started. Carries the output pipe's read end; not with own_stdio.

    Whichever of us two dies then, the other holds the pipe.
    """

    seq: int


class Started(_Message, frozen=True):
    """The task's program runs.

    Attributes:
        pid: the task's main process, in the host's pid namespace.
        slot: the slot's name.
        started_at: Unix time in seconds.
    """

    seq: int
    pid: int
    slot: str
    started_at: float


class Ended(_Message, frozen=True):
    """The task ended and nothing of it lives (or the outcome's reason says what does).

    All its output is in the pipe. The output fields of the outcome are the supervisor's to fill in.
    Carries the output pipe's read end too, if it did not go over this connection before.
    """

    seq: int
    outcome: Outcome


class Unstarted(_Message, frozen=True):
    """The launcher was killed before it let the task go: nothing of it ran, and it is forgotten."""

    seq: int


class Cancel(_Message, frozen=True):
    """Terminate the task: SIGTERM, grace, kill. For a seq that is unknown or ended: nothing."""

    seq: int


class Acknowledge(_Message, frozen=True):
    """The outcome is journalled: its record may go."""

    seq: int


class List(_Message, frozen=True):
    """Tell the tasks with seq > ``after``, lowest first, one page."""

    after: int


class ListedTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task the spawner knows. ``outcome`` is None while it lives, ``started_at`` 0 before that.

    ``has_output`` says that the message carries this task's output pipe, in the order of the list.
    """

    seq: int
    pid: int
    slot: str
    started_at: float
    has_output: bool
    outcome: Outcome | None


class Listed(_Message, frozen=True):
    """A page of tasks; ``more`` says whether to ask again after the last seq."""

    tasks: tuple[ListedTask, ...]
    more: bool


class Finish(_Message, frozen=True):
    """No more Starts will come from this supervisor. Sent at a clean stop.

    The spawner ends as soon as no task lives and every outcome is acknowledged, instead of waiting
    for a next supervisor.
    """


class Renew(_Message, frozen=True):
    """Have the installed code take over as a new spawner; this one only finishes its own tasks.

    Serving goes on until Renewed says that it is done. Nothing is done by halves.
    """

    tuning: str


class Renewed(_Message, frozen=True):
    """The answer to Renew. A Start that comes after it is not run: connect anew.

    Attributes:
        error: why not, in which case all is as before; empty when the new spawner listens.
    """

    error: str


class SetAside(_Message, frozen=True):
    """Slots that cannot be used or cleaned up again: something in them could not be killed.

    Attributes:
        count: how many.
        slots: the names of the first.
    """

    count: int
    slots: tuple[str, ...]


class Job(_Message, frozen=True):
    """Tell what the service manager is about to do with the service that the supervisor is."""


class JobTold(_Message, frozen=True):
    """The answer to Job.

    Attributes:
        kind: systemd's word, such as ``stop`` or ``restart``; empty when there is no job.
        error: why that cannot be known; empty when it is.
    """

    kind: str
    error: str


class Refused(_Message, frozen=True):
    """The spawner cannot do what the last message asked; the connection is closed after it."""

    reason: str


Message = (
    Hello
    | Welcome
    | Start
    | Prepared
    | Started
    | Ended
    | Unstarted
    | Cancel
    | Acknowledge
    | List
    | Listed
    | Finish
    | Renew
    | Renewed
    | SetAside
    | Job
    | JobTold
    | Refused
)

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Message)


def encode(message: Message) -> bytes:
    """One packet.

    Raises:
        ProtocolError: it would be longer than MAX_MESSAGE_BYTES.
    """
    packet = _ENCODER.encode(message)
    if len(packet) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"cannot send {message.type}: {len(packet)} bytes, the limit is {MAX_MESSAGE_BYTES}"
        )
    return packet


def encoded_bytes(task: ListedTask) -> int:
    """How long one task of a list is."""
    return len(_ENCODER.encode(task))


def decode(packet: bytes) -> Message:
    """The message in one packet.

    Raises:
        ProtocolError: it is not one of ours, or a field is missing, unknown or of another type.
    """
    try:
        return _DECODER.decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"cannot read a message of {len(packet)} bytes: {error}") from error
