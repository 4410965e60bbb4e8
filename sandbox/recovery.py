"""What a spawner does with the tasks of spawners before it: by their records, slots and cgroups."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import signal
from collections.abc import Callable, Iterable
from typing import Final

from stockade.platform import pidfd, proc
from stockade.platform.errors import SyscallError
from stockade.sandbox import slot
from stockade.sandbox.elders import Elders
from stockade.sandbox.engine_task import ContainerTask
from stockade.sandbox.equipment import Equipment
from stockade.sandbox.record import (
    DAMAGED,
    Cause,
    Record,
    RecordFile,
    SlotRecord,
    generation_of,
    recorded_slots,
)
from stockade.sandbox.slot import Slot
from stockade.sandbox.task import Phase
from stockade.sandbox.tasks import Tasks

log = logging.getLogger(__name__)


_SETTLE_LOOKS: Final = 100
_SETTLE_LOOK_S: Final = 0.01
_KILLED_S: Final = 2.0


class Succession(enum.Enum):
    """How this spawner came to be in charge.

    STANDBY: the one before it just died; its tasks are kept, with their deadlines.
    FIRST: nobody was in charge. What still lives had no deadline for an unknown time: it is killed.
    """

    FIRST = enum.auto()
    STANDBY = enum.auto()


def recover(tasks: Tasks, elders: Elders, succession: Succession) -> None:
    """Takes over, or ends, every task of dead spawners; then sweeps what belongs to none.

    What living elders have is theirs.
    """
    alive = frozenset(elders.generations)
    directory = tasks.equipment.places.spawner
    _take_records(tasks, elders, succession, lambda generation: generation not in alive)
    _sweep(tasks, lambda generation: generation not in alive)
    for name in os.listdir(directory):
        stem, _, kind = name.partition(".")
        if kind in ("sock", "old") and stem.isdigit() and int(stem) not in alive:
            os.unlink(name, dir_fd=directory)
    if tasks.by_seq:
        log.info("took over %d tasks from an earlier spawner", len(tasks.by_seq))


def inherit(tasks: Tasks, elders: Elders, dead: int) -> None:
    """Takes over what an elder had that died while it finished its tasks."""
    before = len(tasks.by_seq)
    _take_records(tasks, elders, Succession.STANDBY, lambda generation: generation == dead)
    alive = {tasks.equipment.generation, *elders.generations}
    _sweep(tasks, lambda generation: generation not in alive)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{dead}.old", dir_fd=tasks.equipment.places.spawner)
    if len(tasks.by_seq) > before:
        log.info("took over %d tasks from an elder that died", len(tasks.by_seq) - before)


def _take_records(
    tasks: Tasks, elders: Elders, succession: Succession, is_ours: Callable[[int], bool]
) -> None:
    directory = tasks.equipment.places.record
    ours: list[tuple[RecordFile, Record, SlotRecord]] = []
    for name in sorted(os.listdir(directory)):
        if name.endswith(DAMAGED) or int(name) in tasks.by_seq:
            continue
        try:
            record = RecordFile.open(directory, int(name))
        except FileNotFoundError:
            # A living elder's, removed just now.
            continue
        try:
            found = record.read()
            generation = found.generation
        except ValueError as error:
            # Kept for a person to read, under a name that is not taken for a record again.
            log.error("cannot read record %s: %s; kept as %s%s", name, error, name, DAMAGED)
            record.close()
            with contextlib.suppress(OSError):
                os.rename(name, name + DAMAGED, src_dir_fd=directory, dst_dir_fd=directory)
            continue
        if found.slot is None or generation is None:
            # Made, and its maker died before it handed anything to a launcher: never started. Or
            # its maker is an elder that is about to write.
            if elders.generations:
                record.close()
            else:
                record.remove()
        elif is_ours(generation):
            ours.append((record, found, found.slot))
        else:
            record.close()
    # Those whose end is known come last: they may have had the uid of one that lives before it.
    for record, found, header in sorted(ours, key=lambda each: each[1].outcome is not None):
        _take_over(tasks, succession, record, found, header)


def _take_over(
    tasks: Tasks, succession: Succession, record: RecordFile, found: Record, header: SlotRecord
) -> None:
    launcher = _open_launcher(header)
    if launcher is not None and _exits_soon(record, launcher):
        os.close(launcher)
        launcher = None
    found = record.read()
    if launcher is not None and succession is Succession.FIRST and found.never_started:
        # It is stopped, perhaps. What it was to start can still be started by another.
        pidfd.send_signal(launcher, signal.SIGKILL)
        if pidfd.has_ended(launcher, _KILLED_S):
            os.close(launcher)
            launcher = None
        found = record.read()
    if launcher is None and found.never_started and header.boot_id == proc.boot_id():
        # The launcher writes "started" before it lets the task go, so this one never ran. Without
        # a record the supervisor sends it again; what is left of its slot is swept.
        record.remove()
        return
    equipment = tasks.equipment
    record.append_owner(equipment.generation)
    header, uid_lock = _adopt_uid(equipment, header, launcher)
    task = tasks.take_on(_slot_of(equipment, header, launcher, uid_lock), record, header)
    task.started = found.started
    if found.outcome is not None:
        task.outcome = found.outcome
        task.phase = Phase.OVER
        if launcher is not None:
            os.close(launcher)
            task.slot.launcher_pidfd = -1
        used = task.slot
        tasks.cleaner.clean(used.name, used.groups, used.uid, used.uid_lock)
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


def _adopt_uid(
    equipment: Equipment, header: SlotRecord, launcher: int | None
) -> tuple[SlotRecord, int | None]:
    """The slot with its uid, if it still has it, and what locks that besides its launcher."""
    if header.uid is None or equipment.uids is None:
        return header, None
    if launcher is not None:
        equipment.uids.adopt(header.uid)
        return header, None
    uid_lock = equipment.uids.adopt_dead(header.uid)
    if uid_lock is None:
        # Whoever has it now is not to be killed, nor what is theirs to be swept.
        log.warning("uid %d of task seq=%d is another's by now", header.uid, header.seq)
        header = dataclasses.replace(header, uid=None)
    return header, uid_lock


def _slot_of(
    equipment: Equipment, header: SlotRecord, launcher: int | None, uid_lock: int | None
) -> Slot:
    groups = None
    if header.cgroup is not None and equipment.tree is not None:
        groups = equipment.tree.slot(header.slot)
    try:
        output_fd = slot.open_output(equipment.places, header.slot)
    except FileNotFoundError:
        output_fd = -1
    return Slot(
        name=header.slot,
        uid=header.uid,
        uid_lock=uid_lock,
        groups=groups,
        launcher_pid=header.launcher_pid,
        launcher_start=header.launcher_start,
        launcher_pidfd=-1 if launcher is None else launcher,
        channel=None,
        message_fd=-1,
        output_fd=output_fd,
    )


def _maker(name: str) -> int:
    """The generation whose slot this is; 0, which no spawner has, for what is no slot's name."""
    try:
        return generation_of(name)
    except ValueError:
        return 0


def _sweep(tasks: Tasks, is_dead: Callable[[int], bool]) -> None:
    """Removes what dead spawners left: groups, work directories, FIFOs."""
    places, tree = tasks.equipment.places, tasks.equipment.tree
    kept = {task.slot.name for task in tasks.by_seq.values()} | tasks.cleaner.busy
    # An elder's task may be in a slot that one before it made.
    kept |= {theirs.slot for theirs in recorded_slots(places.record, tasks.by_seq)}

    def stale(names: Iterable[str]) -> set[str]:
        return {name for name in names if name not in kept and is_dead(_maker(name))}

    left = stale(os.listdir(places.work))
    if tree is not None:
        for name in stale(tree.slots()):
            groups = tree.slot(name)
            try:
                groups.kill(tasks.equipment.controllers)
            except OSError as error:
                log.warning("cannot kill what is left in slot %s: %s", name, error)
            tasks.cleaner.clean(name, groups, None, None)
            left.discard(name)
    for name in left:
        tasks.cleaner.clean(name, None, None, None)
    for name in stale(os.listdir(places.output)):
        os.unlink(name, dir_fd=places.output)
