"""A slot's child, from clone3 to the launcher: Python still, so kept short."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
from collections.abc import Sequence
from typing import Final, NoReturn

from stockade.platform import clone, landlock, namespaces, proc, userns
from stockade.platform.errors import StockadeError
from stockade.sandbox import landlock_policy, steps
from stockade.sandbox.confinement import Confinement
from stockade.sandbox.launch_message import FD_CHANNEL, FD_RULESET
from stockade.sandbox.system_steps import TASK_DIRECTORY
from stockade.sandbox.work_directory import mount_of

# What the child says on the channel when it cannot even become a launcher; then a text.
SETUP_FAILED: Final = b"!"

# Descriptors are first copied above this number, so that none is overwritten before it was moved.
_PARKED: Final = 64
_TEXT_BYTES: Final = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """Where a child starts from.

    Attributes:
        confinement: the plan.
        template: the mount namespace in which the plan's system steps were done; -1: the child has
            a user and a mount namespace of its own, and does them.
        work_mount: a mount of the work directory; -1: the child makes it, of ``work_path``.
        work_path: of the work directory as the spawner sees it.
        uid: of the spawner, before the child had a user namespace.
        gid: the same.
        oom_score_adj: of the launcher and the task.
    """

    confinement: Confinement
    template: int
    work_mount: int
    work_path: str
    uid: int
    gid: int
    oom_score_adj: int

    @property
    def clone_flags(self) -> int:
        """CLONE_NEW* for the child."""
        return self.confinement.clone_flags(from_template=self.template >= 0)


def become_launcher(ground: Ground, table: Sequence[int], launcher_fd: int) -> NoReturn:
    """The steps of the slot, then exec.

    Args:
        ground: what to do, and with what.
        launcher_fd: the launcher's program.
        table: what descriptor 0, 1, 2, ... of the launcher are to be.
    """
    try:
        os.setsid()
        prepare(ground)
        table = list(table)
        if ground.confinement.grants is not None:
            with steps.named("make a Landlock ruleset"):
                table[FD_RULESET] = _ruleset(ground.confinement.grants)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD, _PARKED) for fd in table]
        for target, fd in enumerate(parked):
            os.dup2(fd, target)
        os.execve(launcher_fd, ["stockade-launcher"], {})
    except (StockadeError, OSError) as error:
        text = str(error).encode(errors="backslashreplace")[:_TEXT_BYTES]
        channel = table[FD_CHANNEL]
        with socket.socket(fileno=channel) as peer:
            peer.send(SETUP_FAILED + text)
    finally:
        os._exit(1)


def prepare(ground: Ground) -> None:
    """Everything that the plan says, in the child.

    Raises:
        SandboxSetupError: names the step, the call, its error, and what mends it.
    """
    confinement = ground.confinement
    # The worker, and perhaps its unit (OOMScoreAdjust=), are protected; tasks are not.
    with steps.named("set oom_score_adj"):
        proc.set_oom_score_adj(ground.oom_score_adj)
    os.umask(0)
    kept = {TASK_DIRECTORY: ground.work_mount}
    if confinement.has_own_files:
        if ground.template >= 0:
            with steps.named("enter a copy of the mount namespace that the spawner keeps"):
                namespaces.enter(ground.template, clone.CLONE_NEWNS)
                namespaces.unshare(clone.CLONE_NEWNS)
        else:
            with steps.named("map its own user and group into the user namespace"):
                userns.keep_own_ids(ground.uid, ground.gid)
            with steps.named("keep the work directory"):
                kept[TASK_DIRECTORY] = mount_of(ground.work_path)
            steps.run(confinement.system, kept)
    steps.run(confinement.slot, kept)
    if confinement.has_own_files:
        os.chdir("/")


def _ruleset(grants: landlock_policy.Grants) -> int:
    # A host without /var/tmp has none in the slot either.
    there = [path for path in grants.read_write if os.path.exists(path)]
    return landlock_policy.make_ruleset(
        landlock.abi(), dataclasses.replace(grants, read_write=there)
    )
