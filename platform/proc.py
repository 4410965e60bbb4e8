"""Processes as /proc shows them. Every reader copes with a process that ends meanwhile.

Only processes that live are told: one that ended and waits to be reaped cannot run, fork or be
killed. A process whose first thread has ended while others run looks like one of those (state Z)
and is not: it is told.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stockade.platform import _libc
from stockade.platform._libc import translated

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """One line of /proc/PID/stat, proc_pid_stat(5).

    Attributes:
        started_ticks: clock ticks after boot; with the pid it names a process for good.
    """

    pid: int
    state: str
    parent: int
    group: int
    session: int
    threads: int
    started_ticks: int

    @property
    def is_alive(self) -> bool:
        """False for a process that only waits to be reaped."""
        return self.state not in "ZX" or self.threads > 1


def boot_id() -> str:
    """A text that differs after every boot of the host."""
    with translated("read", "/proc/sys/kernel/random/boot_id"):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process(pid: int) -> Process | None:
    """The process, also one that waits to be reaped; None when there is none."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    # The name stands in parentheses and may hold spaces, parentheses and newlines itself.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        started_ticks=int(fields[19]),
    )


def start_time_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None when there is none."""
    found = process(pid)
    return None if found is None else found.started_ticks


def all_processes() -> dict[int, Process]:
    """Every live process of our pid namespace, by pid: a picture taken over some milliseconds."""
    found = (process(pid) for pid in _pids())
    return {one.pid: one for one in found if one is not None and one.is_alive}


def children(pid: int) -> list[int]:
    """Live processes whose parent is ``pid``."""
    return [one.pid for one in all_processes().values() if one.parent == pid]


def namespaced_pids(pid: int) -> tuple[int, ...]:
    """A process' number in each pid namespace that it is in, ours first, its innermost last.

    Empty when there is no such process.

    Source: proc_pid_status(5), NSpid (Linux 4.1).
    """
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, numbers = line.partition(b":")
        if name == b"NSpid":
            return tuple(map(int, numbers.split()))
    return ()


def child_by_own_number(parent: int, number: int) -> int | None:
    """The live child of ``parent`` that has this number in its own pid namespace; None without."""
    listed = (
        map(int, _read(f"/proc/{parent}/task/{parent}/children").split())
        if _lists_children()
        else children(parent)
    )
    for pid in listed:
        if namespaced_pids(pid)[-1:] == (number,):
            return pid
    return None


@functools.cache
def _lists_children() -> bool:
    """Whether the kernel has CONFIG_PROC_CHILDREN."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants(pid: int) -> list[int]:
    """Live children, their children, and so on, parents before children; ``pid`` is not in it.

    A process whose parent has ended belongs to the nearest subreaper and is not found below
    its old ancestors.
    """
    by_parent: dict[int, list[int]] = {}
    for one in all_processes().values():
        by_parent.setdefault(one.parent, []).append(one.pid)
    found = list(by_parent.get(pid, ()))
    seen = {pid, *found}
    for parent in found:  # grows while it is walked
        # Pids may be used again while the picture is taken, so it can hold a circle.
        new = [child for child in by_parent.get(parent, ()) if child not in seen]
        seen.update(new)
        found.extend(new)
    return found


def processes_of_session(session: int) -> list[int]:
    """Live processes of one session, setsid(2)."""
    return [one.pid for one in all_processes().values() if one.session == session]


def processes_of_uid(uid: int) -> list[int]:
    """Live processes whose real, effective, saved or file-system uid is ``uid``."""
    # The owner of /proc/PID would be cheaper, but is the effective uid alone.
    wanted = b"%d" % uid
    with_uid = (pid for pid in _pids() if wanted in _uids(pid))
    return [pid for pid in with_uid if (one := process(pid)) is not None and one.is_alive]


def _uids(pid: int) -> list[bytes]:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return line.split()[1:]
    return []


def memory_bytes(pids: Iterable[int]) -> int:
    """Memory that these processes hold together, in RAM or swapped out.

    A page that several of them share counts once (proportional set size, Linux 4.14) where we may
    look; where we may not, the resident set counts, shared pages with it.
    """
    total = 0
    counted: dict[int, bytes] = {}
    for pid in pids:
        rollup = _rollup(pid)
        if rollup is None:
            statm = _read(f"/proc/{pid}/statm").split()
            total += int(statm[1]) * PAGE_BYTES if statm else 0
            continue
        # The first line holds the ends of the address space. Equal ends: a copy, or the very same
        # memory, as a vfork child has until it execs. Counted twice, every posix_spawn of a large
        # program would look like twice its size.
        ends, _, numbers = rollup.partition(b"\n")
        if ends and ends in counted.values() and _shares_memory_with_parent(pid, counted):
            continue
        counted[pid] = ends
        total += 1024 * sum(
            int(line.split()[1])
            for line in numbers.splitlines()
            if line.startswith((b"Pss:", b"SwapPss:"))
        )
    return total


def _rollup(pid: int) -> bytes | None:
    """smaps_rollup, empty for a process that is gone; None when we may not look."""
    try:
        rollup = _read_or_raise(f"/proc/{pid}/smaps_rollup")
        if rollup:
            return rollup
        # The first thread may have ended and given up the memory that the others go on using.
        for thread in os.listdir(f"/proc/{pid}/task"):
            rollup = _read_or_raise(f"/proc/{pid}/task/{thread}/smaps_rollup")
            if rollup:
                return rollup
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        pass
    return b""


def _shares_memory_with_parent(pid: int, counted: Container[int]) -> bool:
    found = process(pid)
    return found is not None and found.parent in counted and _libc.share_memory(pid, found.parent)


def _pids() -> Iterator[int]:
    with translated("open", "/proc"), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def _read(path: str) -> bytes:
    """The file, or nothing when the process is gone or not ours to see."""
    try:
        return _read_or_raise(path)
    except PermissionError:
        return b""


def _read_or_raise(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
        return b"".join(parts)
    except ProcessLookupError:
        return b""
    finally:
        os.close(fd)


def oom_score_adj() -> int:
    """Our own oom_score_adj: -1000 (never killed by the kernel for memory) to 1000 (first)."""
    with translated("read", "/proc/self/oom_score_adj"):
        return int(Path("/proc/self/oom_score_adj").read_text())


def set_oom_score_adj(score: int) -> None:
    """Sets our own; children inherit it.

    Raises:
        SyscallError: EACCES; it would be lower than what a privileged process last gave us, and
            we lack CAP_SYS_RESOURCE.
    """
    with translated("write", "/proc/self/oom_score_adj", str(score)):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(score).encode())
        finally:
            os.close(fd)
