"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tiny_filesystem(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Made at ``directory``, which must not exist; takes root."""
    directory.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", directory], check=True
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def fill(path: Path) -> None:
    """Writes a file until nothing more fits beside it."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
