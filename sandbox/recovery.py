"""What a spawner does with the tasks of spawners before it: by their records, slots and cgroups."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from typing import TYPE_CHECKING, Final

from stockade.platform import pidfd, proc
from stockade.platform.errors import SyscallError
from stockade.sandbox import slot
from stockade.sandbox.engine_task import ContainerTask
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, Record, RecordFile, SlotRecord
from stockade.sandbox.slot import Slot
from stockade.sandbox.task import Phase

if TYPE_CHECKING:
    from stockade.sandbox.spawner import Spawner

log = logging.getLogger(__name__)


_SETTLE_LOOKS: Final = 100
_SETTLE_LOOK_S: Final = 0.01


class Succession(enum.Enum):
    """How this spawner came to be in charge.

    STANDBY: the one before it just died; its tasks are kept, with their deadlines.
    FIRST: nobody was in charge. What still lives had no deadline for an unknown time: it is killed.
    """

    FIRST = enum.auto()
    STANDBY = enum.auto()


def recover(spawner: Spawner, succession: Succession) -> None:
    """Takes over, or ends, every task that has a record; then sweeps what belongs to none."""
    for name in sorted(os.listdir(spawner.places.record)):
        try:
            record = RecordFile.open(spawner.places.record, int(name))
            found = record.read()
        except (ValueError, OSError) as error:
            # Kept for a person to read, under a name that is not taken for a record again.
            log.error("cannot read record %s: %s; kept as %s.damaged", name, error, name)
            with contextlib.suppress(OSError):
                os.rename(
                    name, f"{name}.damaged",
                    src_dir_fd=spawner.places.record, dst_dir_fd=spawner.places.record,
                )  # fmt: skip
            continue
        if found.slot is None:
            # Made, and its maker died before it handed anything to a launcher: never started.
            record.remove()
            continue
        _take_over(spawner, succession, record, found, found.slot)
    _sweep(spawner)
    if spawner.tasks:
        log.info("took over %d tasks from an earlier spawner", len(spawner.tasks))


def _take_over(
    spawner: Spawner, succession: Succession, record: RecordFile, found: Record, header: SlotRecord
) -> None:
    launcher = _open_launcher(header)
    if launcher is not None and _exits_soon(record, launcher):
        os.close(launcher)
        launcher = None
    found = record.read()
    if launcher is None and found == Record(slot=header) and header.boot_id == proc.boot_id():
        # The launcher writes "started" before it lets the task go, so this one never ran. Without
        # a record the supervisor sends it again; what is left of its slot is swept.
        record.remove()
        return
    task = spawner.make_task(
        _slot_of(spawner, header, launcher), record, header,
        spawner.degraded(Profile(header.profile), header.limits),
    )  # fmt: skip
    spawner.tasks[task.seq] = task
    task.started = found.started
    if header.uid is not None and spawner.uids is not None:
        spawner.uids.adopt(header.uid)
    if found.outcome is not None:
        task.outcome = found.outcome
        task.phase = Phase.OVER
        if launcher is not None:
            os.close(launcher)
            task.slot.launcher_pidfd = -1
        used = task.slot
        spawner.cleaner.clean(used.name, used.groups, used.uid, None)
    elif launcher is None:
        task.launcher_exited()
    elif (
        succession is Succession.STANDBY
        # A container is its engine's and not ours: it may well be over by now, and its deadline is
        # in the record.
        or isinstance(task, ContainerTask)
        or found.ended is not None
        or found.failed is not None
    ):
        task.adopt(found)
    else:
        task.kill(Cause.LOST, "the worker's processes died while the task ran")


def _exits_soon(record: RecordFile, launcher: int) -> bool:
    """Whether the launcher has exited, or does so now because it never got its message.

    Its channel is closed: within moments it has started the task, or is gone. One that does
    neither (it is stopped, say) is followed like any other.
    """
    for _ in range(_SETTLE_LOOKS):
        if pidfd.has_ended(launcher, _SETTLE_LOOK_S):
            return True
        found = record.read()
        if found.started is not None or found.failed is not None:
            return False
    return False


def _open_launcher(header: SlotRecord) -> int | None:
    """A pidfd of the task's launcher, if that very process still lives."""
    if header.boot_id != proc.boot_id():
        return None
    try:
        fd = pidfd.open_pidfd(header.launcher_pid)
    except SyscallError:
        return None
    # Looked at after the pidfd was opened: from here on the number means this process.
    if proc.start_time_ticks(header.launcher_pid) != header.launcher_start:
        os.close(fd)
        return None
    return fd


def _slot_of(spawner: Spawner, header: SlotRecord, launcher: int | None) -> Slot:
    groups = None
    if header.cgroup is not None and spawner.tree is not None:
        groups = spawner.tree.slot(header.slot)
    try:
        output_fd = slot.open_output(spawner.places, header.slot)
    except FileNotFoundError:
        output_fd = -1
    return Slot(
        name=header.slot,
        uid=header.uid,
        uid_lock=None,
        groups=groups,
        launcher_pid=header.launcher_pid,
        launcher_start=header.launcher_start,
        launcher_pidfd=-1 if launcher is None else launcher,
        channel=None,
        message_fd=-1,
        output_fd=output_fd,
    )


def _sweep(spawner: Spawner) -> None:
    """Removes what earlier lives left: groups, work directories, FIFOs, sockets."""
    kept = {task.slot.name for task in spawner.tasks.values()}
    stale = set(os.listdir(spawner.places.work)) - kept
    if spawner.tree is not None:
        for name in set(spawner.tree.slots()) - kept:
            groups = spawner.tree.slot(name)
            try:
                groups.kill(spawner.controllers)
            except OSError as error:
                log.warning("cannot kill what is left in slot %s: %s", name, error)
            spawner.cleaner.clean(name, groups, None, None)
            stale.discard(name)
    for name in stale:
        spawner.cleaner.clean(name, None, None, None)
    for name in set(os.listdir(spawner.places.output)) - kept:
        os.unlink(name, dir_fd=spawner.places.output)
    for name in os.listdir(spawner.places.spawner):
        if name.endswith(".sock"):
            os.unlink(name, dir_fd=spawner.places.spawner)
