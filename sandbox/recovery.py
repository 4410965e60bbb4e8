"""What a spawner does with the tasks of spawners before it: by their records, slots and cgroups."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from stockade.platform import pidfd, proc
from stockade.platform.errors import SyscallError
from stockade.sandbox import slot
from stockade.sandbox.engine_task import ContainerTask
from stockade.sandbox.profiles import Profile
from stockade.sandbox.record import Cause, Record, RecordFile, SlotRecord, generation_of
from stockade.sandbox.slot import Slot
from stockade.sandbox.task import Phase

if TYPE_CHECKING:
    from stockade.sandbox.spawner import Spawner

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


def recover(spawner: Spawner, succession: Succession) -> None:
    """Takes over, or ends, every task of dead spawners; then sweeps what belongs to none.

    What living elders have is theirs.
    """
    alive = frozenset(spawner.elders.generations)
    _take_records(spawner, succession, lambda generation: generation not in alive)
    _sweep(spawner, lambda generation: generation not in alive)
    for name in os.listdir(spawner.places.spawner):
        stem, _, kind = name.partition(".")
        if kind in ("sock", "old") and stem.isdigit() and int(stem) not in alive:
            os.unlink(name, dir_fd=spawner.places.spawner)
    if spawner.tasks:
        log.info("took over %d tasks from an earlier spawner", len(spawner.tasks))


def inherit(spawner: Spawner, dead: int) -> None:
    """Takes over what an elder had that died while it finished its tasks."""
    before = len(spawner.tasks)
    _take_records(spawner, Succession.STANDBY, lambda generation: generation == dead)
    alive = {spawner.generation, *spawner.elders.generations}
    _sweep(spawner, lambda generation: generation not in alive)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{dead}.old", dir_fd=spawner.places.spawner)
    if len(spawner.tasks) > before:
        log.info("took over %d tasks from an elder that died", len(spawner.tasks) - before)


def _take_records(spawner: Spawner, succession: Succession, is_ours: Callable[[int], bool]) -> None:
    for name in sorted(os.listdir(spawner.places.record)):
        if name.endswith(".damaged") or int(name) in spawner.tasks:
            continue
        try:
            record = RecordFile.open(spawner.places.record, int(name))
        except FileNotFoundError:
            # A living elder's, removed just now.
            continue
        try:
            found = record.read()
            generation = found.generation
        except ValueError as error:
            # Kept for a person to read, under a name that is not taken for a record again.
            log.error("cannot read record %s: %s; kept as %s.damaged", name, error, name)
            record.close()
            with contextlib.suppress(OSError):
                os.rename(
                    name, f"{name}.damaged",
                    src_dir_fd=spawner.places.record, dst_dir_fd=spawner.places.record,
                )  # fmt: skip
            continue
        if found.slot is None or generation is None:
            # Made, and its maker died before it handed anything to a launcher: never started. Or
            # its maker is an elder that is about to write.
            if spawner.elders.generations:
                record.close()
            else:
                record.remove()
        elif is_ours(generation):
            _take_over(spawner, succession, record, found, found.slot)
        else:
            record.close()


def _take_over(
    spawner: Spawner, succession: Succession, record: RecordFile, found: Record, header: SlotRecord
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
    record.append_owner(spawner.generation)
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


def _sweep(spawner: Spawner, is_dead: Callable[[int], bool]) -> None:
    """Removes what dead spawners left: groups, work directories, FIFOs."""
    kept = {task.slot.name for task in spawner.tasks.values()} | spawner.cleaner.busy
    # An elder's task may be in a slot that one before it made.
    kept |= {theirs.slot for theirs in records_of_others(spawner)}

    def stale(names: Iterable[str]) -> set[str]:
        return {name for name in names if name not in kept and is_dead(generation_of(name))}

    left = stale(os.listdir(spawner.places.work))
    if spawner.tree is not None:
        for name in stale(spawner.tree.slots()):
            groups = spawner.tree.slot(name)
            try:
                groups.kill(spawner.controllers)
            except OSError as error:
                log.warning("cannot kill what is left in slot %s: %s", name, error)
            spawner.cleaner.clean(name, groups, None, None)
            left.discard(name)
    for name in left:
        spawner.cleaner.clean(name, None, None, None)
    for name in stale(os.listdir(spawner.places.output)):
        os.unlink(name, dir_fd=spawner.places.output)


def records_of_others(spawner: Spawner) -> Iterator[SlotRecord]:
    """What living elders, or whoever is in charge beside us, have."""
    for name in os.listdir(spawner.places.record):
        if name.endswith(".damaged") or int(name) in spawner.tasks:
            continue
        with contextlib.suppress(OSError, ValueError):
            record = RecordFile.open(spawner.places.record, int(name))
            try:
                found = record.read().slot
            finally:
                record.close()
            if found is not None:
                yield found
