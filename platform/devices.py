"""Block devices, as /sys shows them."""

from __future__ import annotations

import os
from pathlib import Path

from stockade.platform._libc import translated


def disk_of(path: str | os.PathLike[str]) -> str | None:
    """``MAJOR:MINOR`` of the whole disk that holds ``path``, as io.max takes it.

    None when it cannot be told: the file system has no block device of its own (tmpfs, overlay,
    btrfs, NFS), or /sys does not know it (in a container, say).
    """
    with translated("stat", os.fspath(path)):
        number = os.stat(path).st_dev
    major, minor = os.major(number), os.minor(number)
    if major == 0:
        return None
    entry = Path(f"/sys/dev/block/{major}:{minor}")
    if not entry.exists():
        return None
    # A partition has no queue of its own: limits are its disk's, which is the folder above.
    if (entry / "partition").exists():
        return (entry.resolve().parent / "dev").read_text().strip()
    return f"{major}:{minor}"
