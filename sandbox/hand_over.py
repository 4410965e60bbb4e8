"""Starting a task: from a Start and its descriptors to a launcher that has its message."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from stockade.platform import memfd, prctl, proc
from stockade.sandbox import plan, slot
from stockade.sandbox.confiner import Confiner
from stockade.sandbox.errors import ProtocolError
from stockade.sandbox.places import Places
from stockade.sandbox.profiles import Profile
from stockade.sandbox.protocol import Start
from stockade.sandbox.slot import Slot
from stockade.sandbox.system_steps import TASK_DIRECTORY
from stockade.sandbox.uids import UidPool

_SPEC_MAX_BYTES: Final = 16 * 1024 * 1024


class Request(NamedTuple):
    """What came with a Start by descriptor.

    Attributes:
        files: names and contents for the work directory.
        stdio: the task's 0, 1 and 2, or nothing.
        own_user: it runs as the spawner's own user, without capabilities, and not as the slot's.
    """

    argv: list[bytes]
    environment: list[bytes]
    files: list[tuple[str, bytes]]
    stdio: list[int]
    own_user: bool = False


def read_request(start: Start, fds: Sequence[int]) -> Request:
    """Reads what a Start's descriptors hold; they stay the caller's to close.

    Raises:
        ProtocolError: the descriptors are not what the message says.
    """
    first_stdio = 1 + len(start.files)
    expected = first_stdio + (3 if start.own_stdio else 0)
    if len(fds) != expected:
        raise ProtocolError(f"start {start.seq}: {len(fds)} descriptors, expected {expected}")
    try:
        strings = memfd.read_sealed(fds[0], _SPEC_MAX_BYTES).split(b"\0")[:-1]
        contents = [memfd.read_sealed(fd, _SPEC_MAX_BYTES) for fd in fds[1:first_stdio]]
    except ValueError as error:
        raise ProtocolError(f"start {start.seq}: {error}") from error
    least = 1 if start.container is None else 0
    if start.argc < least or start.envc < 0 or len(strings) != start.argc + start.envc:
        raise ProtocolError(
            f"start {start.seq}: {len(strings)} strings, "
            f"expected {start.argc} arguments and {start.envc} variables"
        )
    return Request(
        argv=strings[: start.argc],
        environment=strings[start.argc :],
        files=list(zip(start.files, contents, strict=True)),
        stdio=list(fds[first_stdio:]),
    )


class Starter:
    """Hands tasks to launchers that wait in their slots."""

    def __init__(
        self, places: Places, uids: UidPool | None, controllers: frozenset[str], confiner: Confiner
    ) -> None:
        self._places = places
        self._confiner = confiner
        self._launcher_uid = uids.launcher_uid if uids is not None else 0
        self._controllers = controllers
        self._own_hard = own_hard_limits()

    def hand_over(self, made: Slot, start: Start, request: Request, record_fd: int) -> None:
        """Prepares the slot for this very task and lets its launcher go.

        Raises:
            OSError: a file cannot be written, or the launcher is gone.
            ValueError: the launcher could not take such a message.
        """
        slot.put_files(made, request.files)
        assert made.plan is not None
        confinement = made.plan.confinement
        directory = TASK_DIRECTORY
        if not confinement.has_own_files:
            directory = self._places.work_directory(made.name)
        if request.own_user:
            # Without capabilities not even root may enter the work directory, which is another's.
            directory = "/"
        message = plan.launch_message(
            argv=request.argv,
            base_environment=request.environment,
            work_directory=directory,
            directory=start.directory,
            rlimits=plan.rlimits(
                start.limits, self._controllers,
                own_hard=self._own_hard,
                threads_of_user=0 if made.uid is not None else threads_of(os.geteuid()),
            ),
            uid=None if request.own_user else made.uid,
            launcher_uid=self._launcher_uid,
            filter_program=self._confiner.filter_of(Profile(start.profile)),
            flags=plan.message_flags(
                confinement,
                has_cgroup=made.groups is not None,
                has_stdio=bool(request.stdio),
            ),
        )  # fmt: skip
        if made.uid is not None and not request.own_user:
            _give_pipes(request.stdio, made.uid)
        slot.launch(made, message, record_fd, request.stdio)


def _give_pipes(stdio: Sequence[int], uid: int) -> None:
    """Lets a task open /dev/stdout anew: pipes that the supervisor made become the task's."""
    for fd in stdio:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.fchown(fd, uid, uid)


def own_hard_limits() -> dict[int, int]:
    """Hard limits that we may not raise for a task; in containers often root may not either."""
    if "CAP_SYS_RESOURCE" in prctl.effective_capabilities():
        return {}
    kinds = (*plan.RLIMITS.values(), resource.RLIMIT_NPROC)
    found = {kind: resource.getrlimit(kind)[1] for kind in kinds}
    return {kind: hard for kind, hard in found.items() if hard != resource.RLIM_INFINITY}


def threads_of(uid: int) -> int:
    """How many threads run as the uid now, which RLIMIT_NPROC counts."""
    found = 0
    for pid in proc.processes_of_uid(uid):
        with contextlib.suppress(OSError):
            found += len(os.listdir(f"/proc/{pid}/task"))
    return found
