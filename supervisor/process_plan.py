"""What a task runs in its slot, and how that travels to the spawner.

Arguments and environment travel in one sealed memfd, each file of the work directory in another, so
the message itself stays small however large the payload is.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Final

from stockade.platform.memfd import sealed_memfd
from stockade.sandbox.limits import Limits
from stockade.sandbox.protocol import Container, Start
from stockade.supervisor.errors import RejectedError, Rejection

# execve(2): one string holds MAX_ARG_STRLEN (32 pages) with its NUL; all of them, with a pointer
# each, a quarter of the stack's soft limit, which is 8 MiB wherever nobody changed it. The margin
# is for what the spawner adds (HOME, TMPDIR, PWD) and what the kernel puts there itself.
MAX_STRING_BYTES: Final = 128 * 1024 - 1
MAX_EXEC_BYTES: Final = 2 * 1024 * 1024 - 64 * 1024
_POINTER_BYTES: Final = 8

# Each file travels as one descriptor, its name within one message; sandbox/protocol.py and
# hand_over.py have the limits that these stay below.
FILES_MAX: Final = 150
FILE_NAME_BYTES_MAX: Final = 255
FILE_NAMES_BYTES_MAX: Final = 8 * 1024
FILES_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One program to run in a slot.

    Attributes:
        argv: the program and its arguments; a name without a slash is looked up in PATH.
        environment: all of the task's environment, but for HOME, TMPDIR and PWD, which the spawner
            sets to the slot's work directory.
        files: content by name, put into the work directory; a name holds no slash.
        directory: absolute working directory; None for the slot's own.
        container: a container to run; ``argv`` are then words for its engine, and may be none.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    directory: str | None = None
    container: Container | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PackedStart:
    """A Start and its content, checked against the kernel's limits; holds no descriptor yet."""

    message: Start
    strings: bytes
    files: tuple[bytes, ...]

    def open_descriptors(self) -> list[int]:
        """The sealed memfds that go with the message; the caller closes them.

        Raises:
            OSError: no descriptor or no memory is left.
        """
        descriptors: list[int] = []
        try:
            for name, content in (
                ("strings", self.strings),
                *(("file", content) for content in self.files),
            ):
                descriptors.append(sealed_memfd(f"stockade-{name}", content))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors


def pack_start(
    seq: int, plan: ProcessPlan, limits: Limits, profile: str, *, own_stdio: bool = False
) -> PackedStart:
    """The Start message for a plan.

    Raises:
        RejectedError: INVALID; the kernel would refuse to execute it, with which part and why.
    """
    if not plan.argv and plan.container is None:
        raise invalid("there is no program")
    if plan.directory is not None and not plan.directory.startswith("/"):
        raise invalid(f"its directory {plan.directory[:100]!r} is not an absolute path")
    for name in plan.environment:
        if not name or "=" in name:
            raise invalid(f"{name[:100]!r} is not the name of an environment variable")
    _check_files(plan.files)
    arguments = [_encode(text, "an argument") for text in plan.argv]
    environment = [
        _encode(f"{name}={value}", f"environment variable {name!r}")
        for name, value in plan.environment.items()
    ]
    total = sum(len(text) + 1 + _POINTER_BYTES for text in (*arguments, *environment))
    if total > MAX_EXEC_BYTES:
        raise RejectedError(
            Rejection.INVALID,
            f"cannot start the task: arguments and environment take {total} bytes, "
            f"the kernel's limit is {MAX_EXEC_BYTES}",
        )
    message = Start(
        seq=seq,
        argc=len(arguments),
        envc=len(environment),
        files=tuple(plan.files),
        own_stdio=own_stdio,
        directory=plan.directory,
        profile=profile,
        limits=limits,
        container=plan.container,
    )
    strings = b"".join(text + b"\0" for text in (*arguments, *environment))
    return PackedStart(message, strings, tuple(plan.files.values()))


def invalid(why: str) -> RejectedError:
    """The error of a plan that cannot be carried out."""
    return RejectedError(Rejection.INVALID, f"cannot start the task: {why}")


def _check_files(files: dict[str, bytes]) -> None:
    names_bytes = 0
    for name in files:
        encoded = _encode(name, "the name of a file")
        if name in ("", ".", "..") or "/" in name:
            raise invalid(
                f"{name[:100]!r} is not a plain file name;"
                " files lie in the work directory itself, without folders"
            )
        if len(encoded) > FILE_NAME_BYTES_MAX:
            raise invalid(
                f"the file name {name[:32]!r}... takes {len(encoded)} bytes,"
                f" the most is {FILE_NAME_BYTES_MAX}"
            )
        names_bytes += len(encoded)
    if len(files) > FILES_MAX or names_bytes > FILE_NAMES_BYTES_MAX:
        raise invalid(
            f"{len(files)} files with {names_bytes} bytes of names; the most is {FILES_MAX}"
            f" and {FILE_NAMES_BYTES_MAX}; put them into one archive"
        )
    content_bytes = sum(memoryview(content).nbytes for content in files.values())
    if content_bytes > FILES_BYTES_MAX:
        raise invalid(f"its files take {content_bytes} bytes, the most is {FILES_BYTES_MAX}")


def _encode(text: str, what: str) -> bytes:
    try:
        # The surrogates stand for bytes of a command line that are not UTF-8.
        encoded = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise RejectedError(
            Rejection.INVALID, f"cannot start the task: {what} is not valid text ({error.reason})"
        ) from error
    if b"\0" in encoded:
        raise RejectedError(Rejection.INVALID, f"cannot start the task: {what} holds a NUL")
    if len(encoded) > MAX_STRING_BYTES:
        raise RejectedError(
            Rejection.INVALID,
            f"cannot start the task: {what} takes {len(encoded)} bytes, "
            f"the kernel's limit for one is {MAX_STRING_BYTES}",
        )
    return encoded
