"""What a guest's console tells: the kernel's last words, recognised while they are written."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Final

TAIL_LINES: Final = 40


class Sign(enum.Enum):
    """What a line of the console means for the whole guest."""

    PANIC = "kernel panic"
    GUEST_OOM = "the guest as a whole ran out of memory"


# A memory limit's kill says "Memory cgroup out of memory": a guest in order.
_PATTERNS: Final = (
    (re.compile(rb"Kernel panic - not syncing: [^\r\n]*"), Sign.PANIC),
    (re.compile(rb"(?<!cgroup )Out of memory: Killed process [^\r\n]*"), Sign.GUEST_OOM),
    (re.compile(rb"Out of memory and no killable processes[^\r\n]*"), Sign.GUEST_OOM),
)


class Console:
    """Follows the file that qemu writes the serial console to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._rest = b""
        self.signs: dict[Sign, str] = {}

    def look(self) -> dict[Sign, str]:
        """Reads what is new; every sign seen so far, with its first line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return self.signs
        self._read += len(new)
        whole, _, rest = (self._rest + new).rpartition(b"\n")
        self._judge(whole)
        # A kernel that panics may not end its line.
        self._judge(rest)
        self._rest = rest
        return self.signs

    def _judge(self, text: bytes) -> None:
        for pattern, sign in _PATTERNS:
            match = pattern.search(text)
            if match is not None:
                self.signs[sign] = max(
                    self.signs.get(sign, ""), match[0].decode(errors="replace"), key=len
                )

    def tail(self) -> str:
        """The last lines, for people."""
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(line.rstrip() for line in lines[-TAIL_LINES:])
