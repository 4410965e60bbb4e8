"""Faults put into a real process at a real system call, by strace: death, or an error.

    with attached(pid, Fault("fdatasync", 3)):           # SIGKILL at its third fdatasync
    with attached(pid, Fault("pwrite64", 1, "EIO")):     # its first pwrite64 fails

A number counts the calls of one thread from the moment strace is there. A call at which a process
dies is not carried out: so the death at call N is the death between N - 1 and N.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stockade.platform import pidfd, proc

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

ATTACH_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What happens at which call.

    Attributes:
        call: a system call's name.
        number: which one of them, from 1.
        error: an errno's name; None: SIGKILL.
        times: that one and the next ones, so many of them.
    """

    call: str
    number: int
    error: str | None = None
    times: int = 1

    def options(self) -> list[str]:
        """strace's, to do it and to trace nothing else."""
        effect = "signal=SIGKILL" if self.error is None else f"error={self.error}"
        when = f"{self.number}..{self.number + self.times - 1}"
        return ["-e", f"trace={self.call}", "-e", f"inject={self.call}:{effect}:when={when}"]

    def __str__(self) -> str:
        effect = "" if self.error is None else f"={self.error}"
        return f"{self.call}#{self.number}{f'x{self.times}' if self.times > 1 else ''}{effect}"


class Strace:
    """A strace that watches one thread.

    Attributes:
        victim: the thread.
    """

    def __init__(self, victim: int, options: Sequence[str]) -> None:
        self.victim = victim
        self._directory = tempfile.TemporaryDirectory(prefix="stockade-strace-")
        self._trace = Path(self._directory.name) / "trace"
        self._process = subprocess.Popen(
            ["strace", "-o", str(self._trace), "-e", "signal=none", *options, "-p", str(victim)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert "attached" in line, f"strace cannot attach: {line}"

    @property
    def done(self) -> bool:
        """Whether the victim is gone, and strace with it."""
        return self._process.poll() is not None

    @property
    def fired(self) -> bool:
        """Whether the fault happened."""
        text = self._trace.read_text(errors="replace")
        return "INJECTED" in text or self.done

    def calls(self) -> collections.Counter[str]:
        """What was called so far, by name."""
        lines = self._trace.read_text(errors="replace").splitlines()
        return collections.Counter(
            found[1] for line in lines if (found := re.match(r"(\w+)\(", line))
        )

    def detach(self) -> None:
        """Let the victim go on by itself."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(ATTACH_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._directory.cleanup()


@contextlib.contextmanager
def attached(victim: int, *faults: Fault) -> Iterator[Strace]:
    """Watches a thread, and puts faults into it; without any, it is traced whole."""
    options = [option for fault in faults for option in fault.options()]
    strace = Strace(victim, options)
    try:
        yield strace
    finally:
        strace.detach()


def under_strace(fault: Fault) -> list[str]:
    """What to put before a command, to have the fault happen in it or in any child of it."""
    return ["strace", "-f", "-o", "/dev/null", *fault.options(), "--"]


def tracing_all(trace: Path, calls: Sequence[str]) -> list[str]:
    """What to put before a command, to have its calls of these kinds written down."""
    return [
        "strace", "-f", "-o", str(trace), "-e", f"trace={','.join(calls)}",
        "-e", "signal=none", "--",
    ]  # fmt: skip


def counted(trace: Path) -> dict[str, int]:
    """How often each call was made, by the thread that made it most."""
    by_thread: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in trace.read_text(errors="replace").splitlines():
        if found := re.match(r"(\d+) +(\w+)\(", line):
            by_thread[found[1], found[2]] += 1
    most: dict[str, int] = {}
    for (_, call), count in by_thread.items():
        most[call] = max(most.get(call, 0), count)
    return most


def threads(pid: int) -> list[int]:
    """A process's threads, the first one first."""
    return sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())


def kill_if_alive(pid: int) -> None:
    """SIGKILL, unless it is gone already."""
    if proc.process(pid) is not None:
        pidfd.checked_kill(pid, signal.SIGKILL)


def wait_until_gone(pid: int, deadline_s: float = 30.0) -> None:
    """Returns when the process runs no more."""
    end = time.monotonic() + deadline_s
    while (found := proc.process(pid)) is not None and found.is_alive:
        assert time.monotonic() < end, f"{pid} still lives"
        time.sleep(0.005)
