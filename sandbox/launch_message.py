"""What the spawner and the launcher tell each other; the one description of it.

The channel is a SOCK_SEQPACKET socket. The spawner sends one packet ``GO``, with descriptors in
this order: the record (opened O_WRONLY | O_APPEND); the task's 0, 1 and 2 if the message has
``STDIO``. Before it, the message lies at offset 0 of the memfd that the launcher has as descriptor
4. The launcher answers with packets of one byte, any of which may be missing, for it does not wait
(the record is what counts): ``SAYS_STARTED``; ``SAYS_FAILED``; ``SAYS_ENDED``, when the task has
ended. The launcher exits when no child is left.

The record is text, one line for each event, each line one write(2):

    started PID MONOTONIC_NS UNIX_NS
    failed STEP ERRNO
    ended WAIT_STATUS UTIME_US STIME_US MAXRSS_KB INBLOCK OUBLOCK MONOTONIC_NS UNIX_NS

``started`` is written before the task's program runs, with the pid as the launcher's namespace has
it. ``failed`` means that the program never ran, also after ``started``; STEP is a Step. ``ended``
has the wait status of wait4(2) and the main process' rusage, its waited-for children included; when
the disk is full the launcher tries until it is not. A line without a newline is still being
written. A record without a line is of a launcher killed before it understood its packet.

A packet that is not as above, or a message the launcher does not accept, gives ``failed message
EINVAL`` (EPERM: a user change asked of a launcher that is not root). Before a packet, closing the
channel ends the launcher. A seccomp filter that forbids sendto(2) hides a failed execve: the task
then shows as ended with exit code 127.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence
from typing import Final

GO: Final = b"G"
SAYS_STARTED: Final = b"s"
SAYS_FAILED: Final = b"f"
SAYS_ENDED: Final = b"e"

FD_NULL: Final = 0
FD_OUTPUT: Final = (1, 2)
FD_CHANNEL: Final = 3
FD_MESSAGE: Final = 4
FD_CGROUP: Final = 5
FD_RULESET: Final = 6
FD_OUTPUT_READER: Final = 7
FD_UID_LOCK: Final = 8

RECORD_STARTED: Final = "started"
RECORD_FAILED: Final = "failed"
RECORD_ENDED: Final = "ended"

MAGIC: Final = 0x4C4B5453
VERSION: Final = 1
MESSAGE_MAX: Final = 8 * 1024 * 1024
RLIMITS_MAX: Final = 16
FILTER_MAX: Final = 4096
GROUPS_MAX: Final = 1024
STRINGS_MAX: Final = 2**18
UMASK_MAX: Final = 0o777

# Little-endian, unsigned, without padding. After the header come, in this order, the rlimits, the
# filter's instructions, the groups, and the strings, each ended by NUL: program, directory,
# arguments, environment. `total_bytes` is the whole message's length.
HEADER_FIELDS: Final = (
    "magic", "version", "total_bytes", "flags",
    "uid", "gid", "init_uid", "init_gid",
    "umask", "group_count", "rlimit_count", "filter_count",
    "argc", "envc", "strings_bytes", "reserved",
)  # fmt: skip
HEADER: Final = struct.Struct("<" + "I" * len(HEADER_FIELDS))
RLIMIT: Final = struct.Struct("<QQQ")
INSTRUCTION_BYTES: Final = 8

RLIM_INFINITY: Final = 2**64 - 1
ID_MAX: Final = 2**32 - 2  # 2**32 - 1 means "leave it" to the kernel


class Flags(enum.IntFlag):
    """The header's flags."""

    CGROUP = 1
    STDIO = 2
    LANDLOCK = 4
    CHANGE_USER = 8
    SAME_USER = 16
    CGROUP_NAMESPACE = 32


NO_FLAGS: Final = Flags(0)


class Step(enum.StrEnum):
    """What the launcher does, by the names that a ``failed`` line uses, in the order it is done.

    MESSAGE is reading packet and message; CLONE making the process (in its cgroup); RECORD writing
    the ``started`` line. GROUPS, GID, UID and CAPABILITIES are the task's or the launcher's own.
    """

    MESSAGE = "message"
    CLONE = "clone"
    SETSID = "setsid"
    NAMESPACE = "namespace"
    STDIO = "stdio"
    RLIMIT = "rlimit"
    GROUPS = "groups"
    GID = "gid"
    UID = "uid"
    CAPABILITIES = "capabilities"
    PDEATHSIG = "pdeathsig"
    DIRECTORY = "directory"
    DESCRIPTORS = "descriptors"
    RECORD = "record"
    LANDLOCK = "landlock"
    SECCOMP = "seccomp"
    EXEC = "exec"


@dataclasses.dataclass(frozen=True, slots=True)
class Users:
    """Who the task and the launcher become, when the launcher is root.

    None of the ids is 0, and ``init_uid`` is not ``uid``: what has one uid can signal each other.
    """

    uid: int
    gid: int
    init_uid: int
    init_gid: int
    groups: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchMessage:
    """All that the launcher needs to know to start a task.

    Attributes:
        program: absolute path for execve(2).
        argv: at least one argument, ``argv[0]`` included.
        environment: ``K=V`` strings.
        directory: working directory, entered with the task's rights.
        users: None runs the task as the user the launcher runs as.
        rlimits: (resource, soft, hard), with RLIM_INFINITY for none.
        filter: a seccomp program, struct sock_filter after struct sock_filter; empty for none.
        flags: CGROUP when descriptor 5 is the cgroup to start the task in; LANDLOCK when 6 is the
            ruleset to put it under; STDIO when those descriptors come with the packet;
            CGROUP_NAMESPACE for a namespace that has the task's group as its root. The two of users
            are set by encode().
    """

    program: bytes
    argv: Sequence[bytes]
    environment: Sequence[bytes]
    directory: bytes
    users: Users | None = None
    rlimits: Sequence[tuple[int, int, int]] = ()
    filter: bytes = b""
    umask: int = 0o077
    flags: Flags = NO_FLAGS


def encode(message: LaunchMessage) -> bytes:
    """The bytes for the launcher's memfd.

    Raises:
        ValueError: the launcher would refuse it; says why. Nothing was sent yet.
    """
    strings = [message.program, message.directory, *message.argv, *message.environment]
    text = b"\0".join(strings) + b"\0"
    if text.count(b"\0") != len(strings):
        raise ValueError("cannot start a task: NUL in an argument, the environment or a path")
    _require("arguments", len(message.argv), 1, STRINGS_MAX)
    _require("environment strings", len(message.environment), 0, STRINGS_MAX)
    _require("rlimits", len(message.rlimits), 0, RLIMITS_MAX)
    _require("umask", message.umask, 0, UMASK_MAX)
    if len(message.filter) % INSTRUCTION_BYTES:
        raise ValueError("cannot start a task: the seccomp filter ends within an instruction")
    _require("filter instructions", len(message.filter) // INSTRUCTION_BYTES, 0, FILTER_MAX)
    flags = message.flags & ~(Flags.CHANGE_USER | Flags.SAME_USER)
    users = message.users
    if users is None:
        flags |= Flags.SAME_USER
        ids, groups = (0, 0, 0, 0), b""
    else:
        flags |= Flags.CHANGE_USER
        ids = (users.uid, users.gid, users.init_uid, users.init_gid)
        for number in (*ids, *users.groups):
            _require("user or group id", number, 1, ID_MAX)
        if users.uid == users.init_uid:
            raise ValueError("cannot start a task: it would share its launcher's uid")
        _require("groups", len(users.groups), 0, GROUPS_MAX)
        groups = struct.pack(f"<{len(users.groups)}I", *users.groups)
    for limit in message.rlimits:
        for number in limit:
            _require("rlimit", number, 0, RLIM_INFINITY)
    limits = b"".join(RLIMIT.pack(*limit) for limit in message.rlimits)
    total = HEADER.size + len(limits) + len(message.filter) + len(groups) + len(text)
    _require("message bytes", total, 0, MESSAGE_MAX)
    header = HEADER.pack(
        MAGIC, VERSION, total, flags,
        *ids,
        message.umask, len(groups) // 4, len(message.rlimits),
        len(message.filter) // INSTRUCTION_BYTES,
        len(message.argv), len(message.environment), len(text), 0,
    )  # fmt: skip
    return b"".join((header, limits, message.filter, groups, text))


def _require(what: str, number: int, lowest: int, highest: int) -> None:
    if not lowest <= number <= highest:
        raise ValueError(f"cannot start a task: {what}: {number} is not {lowest} to {highest}")
