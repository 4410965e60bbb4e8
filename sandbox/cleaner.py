"""Clean-up of used slots, off the spawner's critical path.

A work directory that the task left empty is removed at once. Any other is emptied by a child that
runs as the slot's own uid: whatever the task built in there, nothing of it is touched as root.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import logging
import os
from collections.abc import Callable
from typing import Final, NoReturn

from stockade.platform import clone, files
from stockade.sandbox import cleanup, project_quota, uids
from stockade.sandbox.loop import Loop
from stockade.sandbox.places import Places
from stockade.sandbox.slot_groups import SlotGroups
from stockade.sandbox.uids import UidPool
from stockade.sandbox.work_directory import unmount_work_directory

log = logging.getLogger(__name__)

_CHILDREN: Final = 2
_GROUP_TRIES: Final = 50
_GROUP_RETRY_S: Final = 0.05
_CHILD_TRIES: Final = 60
_CHILD_RETRY_S: Final = 1.0


class Cleaner:
    """Removes slots' groups and work directories, and gives their uids back when all is gone.

    Args:
        watch_child: registers a callback for the end of a child of ours, by pid, with its wait
            status.
        on_set_aside: called whenever ``set_aside`` has grown.
        has_projects: work directories may have project quotas.
    """

    def __init__(
        self, loop: Loop, places: Places, uids: UidPool | None,
        watch_child: Callable[[int, Callable[[int], None]], None],
        on_set_aside: Callable[[], None], *, has_projects: bool,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._places = places
        self._uids = uids
        self._watch_child = watch_child
        self._on_set_aside = on_set_aside
        self._has_projects = has_projects
        self._waiting: collections.deque[_Job] = collections.deque()
        self._running = 0
        self.busy: set[str] = set()
        self.set_aside: list[str] = []

    def expect(self, name: str) -> None:
        """The clean-up of this slot will begin soon."""
        self.busy.add(name)

    def clean(
        self, name: str, groups: SlotGroups | None, uid: int | None, uid_lock: int | None
    ) -> None:
        """Begins the clean-up of a slot of which nothing lives; returns at once."""
        self.busy.add(name)
        project = None
        if self._has_projects:
            project = project_quota.project_of(self._places.work, name)
        self._remove_groups(_Job(name, groups, uid, uid_lock, project), _GROUP_TRIES)

    def put_aside(self, name: str) -> None:
        """A slot of which something is left for good: its uid is not used again, and it is shown.

        The next spawner tries to clean it up anew.
        """
        self.set_aside.append(name)
        self._on_set_aside()

    def _remove_groups(self, job: _Job, tries: int) -> None:
        if job.groups is not None:
            try:
                job.groups.remove()
            except OSError as error:
                # EBUSY for a moment after the last process: retried with a bound.
                if tries > 0:
                    self._loop.call_later(
                        _GROUP_RETRY_S, lambda: self._remove_groups(job, tries - 1)
                    )
                else:
                    self._give_up(job, f"its cgroup: {error}")
                return
        try:
            self._remove_directory(job.name)
        except FileNotFoundError:
            self._done(job)
        except OSError:
            # Not empty, which only a look inside can change.
            self._waiting.append(job)
            self._start_children()
        else:
            self._done(job)

    def _remove_directory(self, name: str) -> None:
        try:
            os.rmdir(name, dir_fd=self._places.work)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            # A tmpfs of a task that saw the spawner's mounts; what was in it goes with it.
            unmount_work_directory(self._places.work_directory(name))
            os.rmdir(name, dir_fd=self._places.work)

    def _start_children(self) -> None:
        while self._waiting and self._running < _CHILDREN:
            job = self._waiting.popleft()
            try:
                owner = os.stat(job.name, dir_fd=self._places.work, follow_symlinks=False).st_uid
                pid, pidfd = clone.clone3(0)
            except FileNotFoundError:
                self._done(job)
                continue
            except OSError as error:
                if job.tries == _CHILD_TRIES:
                    self._give_up(job, f"its work directory: {error}")
                    continue
                # No process or memory to spare, or no descriptor: a host gets over that.
                job.tries += 1
                self._waiting.append(job)
                self._loop.call_later(_CHILD_RETRY_S, self._start_children)
                return
            if pid == 0:
                # What the owner may not remove of its own (immutable files) is left to root.
                _remove_in_child(self._places.work, job.name, 0 if job.as_root else owner)
            os.close(pidfd)
            self._running += 1
            self._watch_child(pid, lambda _status, job=job: self._child_ended(job))  # type: ignore[misc]

    def _child_ended(self, job: _Job) -> None:
        self._running -= 1
        try:
            # The child could empty the directory but not take it from its parent, which is ours.
            self._remove_directory(job.name)
        except FileNotFoundError:
            self._done(job)
        except OSError as error:
            if os.geteuid() == 0 and not job.as_root:
                job.as_root = True
                self._waiting.append(job)
            else:
                self._give_up(job, f"its work directory: {error}")
        else:
            self._done(job)
        self._start_children()

    def _done(self, job: _Job) -> None:
        self.busy.discard(job.name)
        if job.project is not None and self._uids is not None:
            self._lift_quota(job.project, job.uid_lock)
        if job.uid is not None and self._uids is not None:
            self._uids.give_back(job.uid, job.uid_lock)

    def _lift_quota(self, project: int, uid_lock: int | None) -> None:
        """Of a project that its slot does not need any more."""
        lock = uids.lock(project) if uid_lock is None else uid_lock
        if lock is None:
            # Another spawner's slot, and in use again by now, with a quota of its own.
            return
        try:
            project_quota.lift(self._places.work, project)
        except OSError as error:
            # Nothing is held up by it: whoever gets the uid next sets limits anew.
            log.error("cannot lift the quota of project %d: %s", project, error)
        finally:
            if lock != uid_lock:
                uids.unlock(project, lock)

    def _give_up(self, job: _Job, why: str) -> None:
        self.busy.discard(job.name)
        log.error("cannot clean up slot %s: %s; it is set aside", job.name, why)
        self.put_aside(job.name)


@dataclasses.dataclass(slots=True)
class _Job:
    name: str
    groups: SlotGroups | None
    uid: int | None
    uid_lock: int | None
    project: int | None
    as_root: bool = False
    tries: int = 0


def _remove_in_child(work_fd: int, name: str, uid: int) -> NoReturn:
    """In a child: removes what it can of the directory, as ``uid``."""
    try:
        # It can take long, and waiting launchers go when the last copy of their channel is closed.
        files.close_all_but(work_fd)
        if os.geteuid() == 0 and uid != 0:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        cleanup.remove_tree(work_fd, os.fsencode(name))
    finally:
        os._exit(0)
