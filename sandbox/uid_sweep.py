"""What a task leaves of its uid outside its slot, removed before another task gets the uid.

System V IPC, POSIX shared memory and message queues, files in the host's temporary directories, and
keys all belong to a uid and outlive its processes. Tasks with namespaces of their own leave keys
only; those of ``process`` can leave any of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import time
from collections.abc import Callable, Container, Iterator
from typing import Final, NoReturn

from stockade.platform import clone, files, ipc, keyring, mounts
from stockade.platform.errors import StockadeError
from stockade.sandbox.cleanup import remove_tree
from stockade.sandbox.loop import Loop, Timer
from stockade.sandbox.uids import UidPool
from stockade.sandbox.unprotect import open_within

log = logging.getLogger(__name__)

# World-writable directories of the host that tasks of profile process see.
DIRECTORIES: Final = ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", "/run/lock")
# A sweep costs a fork and a look at all these places, as much as two starts: it is done for many
# uids at once. Each of them holds a descriptor until then.
_BATCH: Final = 256
_WAIT_S: Final = 1.0
_PART_BYTES: Final = 65536
_LOOK_S: Final = 5.0
_FINISH_S: Final = 5.0
# Who is in the way of a sweep, such as a task that works in another one's directory, may be gone by
# then.
_SPOILED_S: Final = 60.0


class UidSweeper:
    """Sweeps the uids that the pool got back, many at once, in a child, and frees them then."""

    def __init__(self, loop: Loop, uids: UidPool) -> None:
        self._loop = loop
        self._uids = uids
        self._timer: Timer | None = None
        self._child: _Child | None = None
        uids.on_used = self._uid_was_used
        uids.on_exhausted = self.finish

    def take_up(self) -> None:
        """Sweeps what earlier spawners left: which uids they had still to sweep ended with them."""
        for uid in _owners_found_by_a_child():
            self._uids.reclaim(uid)

    def _uid_was_used(self) -> None:
        if len(self._uids.used) >= min(_BATCH, self._uids.size // 4):
            self._begin()
        elif self._timer is None:
            self._timer = self._loop.call_later(_WAIT_S, self._begin)

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._child is None and self._uids.used:
            # Made first: a sweep that cannot begin leaves the uids to the next one.
            try:
                self._child = _Child(lambda: sweep(self._uids.used))
            except OSError as error:
                # Nothing to spare on this host. Who gave a uid back has no part in it.
                log.warning("cannot sweep used uids yet: %s", error)
                self._timer = self._loop.call_later(_WAIT_S, self._begin)
                return
            self._uids.begin_sweep()
            self._loop.watch(self._child.report, select.EPOLLIN, self._read)

    def _read(self, _events: int) -> None:
        assert self._child is not None
        said = self._child.read()
        if said is None:
            return
        self._loop.unwatch(self._child.report)
        self._child.close()
        self._child = None
        found: dict[int, str] = dict.fromkeys(
            self._uids.swept, "the sweep of what its task left failed"
        )
        if said:
            found = {int(uid): why for uid, why in json.loads(said).items()}
        for uid, why in found.items():
            log.error("uid %d cannot be used now: %s", uid, why)
        if found:
            self._loop.call_later(_SPOILED_S, self._uids.sweep_spoiled)
        self._uids.end_sweep(found)
        if self._uids.used:
            self._uid_was_used()

    def finish(self) -> None:
        """Sweeps all that were used, and waits for it, with a bound: usually some milliseconds."""
        end = time.monotonic() + _FINISH_S
        self._begin()
        while self._child is not None and self._child.has_said(end - time.monotonic()):
            self._read(0)
            self._begin()


def _owners_found_by_a_child() -> list[int]:
    """`owners`; none when it takes long, as where a user's mount in /tmp does not answer."""
    try:
        child = _Child(lambda: sorted(owners()))
    except OSError as error:
        log.warning("cannot look for what earlier tasks left: %s", error)
        return []
    end = time.monotonic() + _LOOK_S
    try:
        while child.has_said(end - time.monotonic()):
            said = child.read()
            if said is not None:
                return list(json.loads(said or b"[]"))
    finally:
        child.close()
    log.warning("what earlier tasks left is not swept: no look at it ends within %g s", _LOOK_S)
    return []


class _Child:
    """A child that does ``work`` and tells what it gave. Its end is the spawner's loop's to see."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._said = b""
        self.report, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            pid, pidfd = clone.clone3(0)
        except OSError:
            os.close(self.report)
            os.close(theirs)
            raise
        if pid == 0:
            _tell_and_exit(work, theirs)
        os.close(theirs)
        os.close(pidfd)

    def has_said(self, wait_s: float) -> bool:
        """Whether it says something, or ends, within that time."""
        looked = select.poll()
        looked.register(self.report, select.POLLIN)
        return bool(looked.poll(1e3 * max(0.0, wait_s)))

    def read(self) -> bytes | None:
        """Waits for a part of its answer: the whole as JSON, empty when it failed, or None yet."""
        part = os.read(self.report, _PART_BYTES)
        if part:
            self._said += part
            return None
        return self._said

    def close(self) -> None:
        os.close(self.report)


def _tell_and_exit(work: Callable[[], object], report: int) -> NoReturn:
    try:
        # As in the cleaner's.
        files.close_all_but(report)
        # As root: a task may have used up its uid's quota of keys.
        keyring.join_new_session()
        files.write_all(report, json.dumps(work()).encode())
    finally:
        os._exit(0)


def sweep(uids: Container[int]) -> dict[int, str]:
    """Removes what these uids left on the host.

    The caller is root, with a session keyring of its own.

    Returns:
        Of the uids of which something is left: why.
    """
    entries: dict[int, list[tuple[str, bytes]]] = {}
    for uid, directory, name in _entries():
        if uid in uids:
            entries.setdefault(uid, []).append((directory, name))
    left: dict[int, str] = {}
    for uid in {*entries, *(uid for uid in _owners_beside_files() if uid in uids)}:
        why = _remove_objects(uid)
        for directory, name in entries.get(uid, ()):
            why = _remove_entry(uid, directory, name) or why
        if why:
            left[uid] = why
    return left


def owners() -> set[int]:
    """The uids that own anything in the places that tasks can leave something."""
    return {*_owners_beside_files(), *(uid for uid, _, _ in _entries())}


def _owners_beside_files() -> Iterator[int]:
    yield from ipc.owners()
    yield from keyring.owners()


def _entries() -> Iterator[tuple[int, str, bytes]]:
    """Owner, directory and name of all that is directly in a directory that tasks share.

    But for what is mounted there, which no task can do: a user's file system (FUSE) can say that it
    is anybody's, and need not answer at all.
    """
    mounted = mounts.mount_points()
    for directory in DIRECTORIES:
        with contextlib.suppress(FileNotFoundError), os.scandir(os.fsencode(directory)) as entries:
            for entry in entries:
                if entry.path in mounted:
                    continue
                # The latter of what was mounted since.
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    yield entry.stat(follow_symlinks=False).st_uid, directory, entry.name


def _remove_objects(uid: int) -> str:
    """Why something is left of what is no file; empty when nothing is."""
    with _as_user(uid):
        try:
            for found in ipc.objects_of(uid):
                ipc.remove(found)
        except OSError as error:
            return str(error)
        if not keyring.clear_user_keyrings():
            return "a task made its keyrings unreadable: what is in them would stay"
    return ""


def _remove_entry(uid: int, directory: str, name: bytes) -> str:
    """Why something is left of it; empty when nothing is."""
    parent = files.open_directory(directory)
    try:
        with contextlib.suppress(StockadeError, OSError):
            _remove_as_user(uid, parent, name)
            return ""
        # What another user put into its directories the uid may not remove, or not even see.
        _empty(uid, parent, name)
        _remove_as_user(uid, parent, name)
    except (StockadeError, OSError) as error:
        return str(error)
    finally:
        os.close(parent)
    return ""


def _remove_as_user(uid: int, parent: int, name: bytes) -> None:
    # As the user: it may be another's by now, who made it anew under the same name.
    with _as_user(uid):
        remove_tree(parent, name)


def _empty(uid: int, parent: int, name: bytes) -> None:
    """Removes, as root, whatever is in a directory if it is the uid's."""
    directory = open_within(parent, name)
    try:
        if os.fstat(directory).st_uid == uid:
            for each in os.listdir(directory):
                remove_tree(directory, os.fsencode(each))
    finally:
        os.close(directory)


@contextlib.contextmanager
def _as_user(uid: int) -> Iterator[None]:
    """Real and effective uid; root is kept as the saved one, to come back. None of it lives."""
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
