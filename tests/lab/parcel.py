"""What travels into a guest: one tar archive with the agent, the checkout and things beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from lab import wheels
from lab.errors import LabError
from lab.hosts import CHECKOUT, LAB

# Where things are in the guest.
GUEST_CHECKOUT: Final = "/srv/stockade"
AGENT_FILES: Final = ("guest.py", "channel.py")
# For a checkout without git: what is made there and never belongs to it.
_MADE: Final = frozenset(
    (".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".mypy_cache",
     ".pytest_cache", ".ruff_cache")
)  # fmt: skip


def checkout_files(checkout: Path = CHECKOUT) -> list[str]:
    """The checkout's files as it is now, committed or not, by path from its root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    else:
        names = []
        for folder, folders, files in os.walk(checkout):
            folders[:] = [name for name in folders if name not in _MADE]
            # A link to a folder is a file of the checkout.
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            names += [
                os.path.relpath(os.path.join(folder, name), checkout) for name in files + links
            ]
    # Removed from the folder and not yet from git's index.
    return sorted({name for name in names if os.path.lexists(checkout / name)})


def write(
    target: Path, cache: Path, beside: Iterable[Path] = (), checkout: Path = CHECKOUT
) -> None:
    """Writes the parcel to ``target``: the checkout, and a wheel made of it.

    The wheel is built here, since a build in an emulated guest takes a minute. Its launcher is
    static and the rest is Python, so it serves every host.

    Args:
        beside: folders that the guest has next to the checkout, as ``../NAME``.

    Raises:
        LabError: one of them is not there, or the wheel cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="stockade-parcel-") as work:
        copy = Path(work, "stockade")
        _copy(checkout, copy)
        # From another copy: building leaves files behind.
        source = Path(work, "source")
        shutil.copytree(copy, source, symlinks=True)
        wheel = wheels.build(source, Path(work, "wheel"), cache)
        with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
            for name in AGENT_FILES:
                tar.add(LAB / name, f"lab/{name}")
            tar.add(wheel, f"wheel/{wheel.name}")
            tar.add(copy, "stockade")
            empty = Path(work, "beside")
            empty.mkdir()
            tar.add(empty, "beside")
            for folder in beside:
                if not folder.is_dir():
                    raise LabError(f"cannot take {folder} into the guest: it is not a folder")
                tar.add(folder.resolve(), f"beside/{folder.resolve().name}")


def _copy(checkout: Path, target: Path) -> None:
    target.mkdir()
    for name in checkout_files(checkout):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Somebody may be editing: what is gone since it was listed is left out.
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(checkout / name, path, follow_symlinks=False)
