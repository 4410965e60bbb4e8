"""What the spawner asks of a zygote (zygote.c); the one description of it.

The zygote says one byte on its SOCK_SEQPACKET socket when it is ready. A request is one packet with
descriptors in this order: the cgroup to start in, if the flags have CLONE_INTO_CGROUP; the program;
then what the launcher's descriptors 0, 1, 2, ... are to be. The answer is the launcher's pid with
its pidfd, or an errno, negative.

The program is the calls that the copy makes before it is a launcher. Descriptors that they open get
the lowest free number, so a program knows them when it is written: the first is FD_PASSED, or the
one after it. A call that fails ends the copy, which says so on the launcher's channel first: "!",
the call's number in the program, and errno.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Sequence
from typing import Final

from stockade.platform import clone, syscalls
from stockade.sandbox.launch_message import FD_CHANNEL, FD_UID_LOCK

READY: Final = b"."
SETUP_FAILED: Final = b"!"
# The first descriptor after those of the launcher.
FD_PASSED: Final = FD_UID_LOCK + 1

MAGIC: Final = 0x5A4B5453
PROGRAM_MAX: Final = 1 << 20

REQUEST: Final = struct.Struct("<IIQ")
ANSWER: Final = struct.Struct("<i")
_PROGRAM: Final = struct.Struct("<IIII")
_CALL: Final = struct.Struct("<6qIIII")
_ARGUMENTS: Final = 6
_TOLERATED: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One system call.

    Attributes:
        name: the kernel's.
        arguments: up to six numbers, or strings (or bytes), of which the call gets a pointer.
        tolerated: up to two errnos with which it may fail.
    """

    name: str
    arguments: tuple[int | str | bytes, ...]
    tolerated: tuple[int, ...] = ()


def encode_request(flags: int, *, into_cgroup: bool) -> bytes:
    """A request's bytes; ``flags``: CLONE_NEW*."""
    if into_cgroup:
        flags |= clone.CLONE_INTO_CGROUP
    return REQUEST.pack(MAGIC, FD_CHANNEL, flags)


def encode_program(calls: Sequence[Call]) -> bytes:
    """A program's bytes.

    Raises:
        ValueError: it would be longer than PROGRAM_MAX.
    """
    numbers = syscalls.numbers(os.uname().machine)
    # Never empty: the zygote wants a NUL at the end.
    text = bytearray(1)
    packed = []
    for call in calls:
        values, pointers = [0] * _ARGUMENTS, 0
        for index, argument in enumerate(call.arguments):
            if isinstance(argument, int):
                values[index] = argument
                continue
            pointers |= 1 << index
            values[index] = len(text)
            text += os.fsencode(argument) + b"\0"
        first, second = (*call.tolerated, *[0] * (_TOLERATED - len(call.tolerated)))
        packed.append(_CALL.pack(*values, numbers[call.name], pointers, first, second))
    program = b"".join((_PROGRAM.pack(MAGIC, len(packed), len(text), 0), *packed, bytes(text)))
    if len(program) > PROGRAM_MAX:
        raise ValueError(f"{len(calls)} steps take {len(program)} bytes, of {PROGRAM_MAX}")
    return program
