"""Disk images of the hosts: made once from Debian packages, kept outside the repository.

An image is named by a hash of what it is made from. It is made in a directory of its own and
renamed into place, under a lock, so it is there whole or not at all; nobody writes to it later
(machines write to overlays).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from lab import debian_root, recipe, wheels
from lab.hosts import LAB, Host, read_list
from lab.locking import locked

# One image a host and checkout is in use; a few more spare a rebuild when switching branches.
KEPT_IMAGES: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A cached image's files."""

    directory: Path

    @property
    def disk(self) -> Path:
        """A raw ext4 file system without partitions."""
        return self.directory / "disk.img"

    @property
    def kernel(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.directory / "initrd.img"


def cache_directory() -> Path:
    """Where images live: STOCKADE_LAB_CACHE, else the user's cache."""
    given = os.environ.get("STOCKADE_LAB_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stockade-lab"


def key(host: Host) -> str:
    """Changes when anything that an image is made from does."""
    digest = hashlib.sha256()
    parts = [host.suite, host.python, str(host.glibc_minor)]
    parts += [*read_list(recipe.PACKAGES), *wheels.requirements()]
    digest.update("\0".join(parts).encode())
    overlays = [*recipe.OVERLAY.rglob("*"), *recipe.EARLY_OVERLAY.rglob("*")]
    modules = [Path(str(module.__file__)) for module in (debian_root, recipe, wheels)]
    for path in sorted([*overlays, *modules]):
        if path.is_file():
            mode = path.stat().st_mode & 0o111
            digest.update(f"\0{path.relative_to(LAB)}\0{mode}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def image(host: Host, cache: Path | None = None) -> Image:
    """The host's image, made now when the cache has none.

    Raises:
        LabUnavailableError: it would have to be made, and cannot be on this machine.
        LabError: making it failed.
    """
    cache = cache or cache_directory()
    images = cache / "images"
    images.mkdir(parents=True, exist_ok=True)
    wanted = images / f"{host.name}-{key(host)}"
    with locked(cache / f"{host.name}.lock"):
        if not wanted.exists():
            started = time.monotonic()
            _say(f"{host.name}: making its image (once)")
            with tempfile.TemporaryDirectory(dir=images, prefix=f".{host.name}-") as work:
                recipe.make(host, Path(work), cache)
                (Path(work) / "image").rename(wanted)
            _say(f"{host.name}: image made in {time.monotonic() - started:.0f} s")
        os.utime(wanted)
        prune(images, host)
    return Image(wanted)


def prune(images: Path, host: Host) -> None:
    """Removes all but the newest of the host's images, and what a killed run left half made."""
    found = [path for path in images.iterdir() if path.name.startswith(f"{host.name}-")]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    left_over = [path for path in images.iterdir() if path.name.startswith(f".{host.name}-")]
    for path in [*found[KEPT_IMAGES:], *left_over]:
        shutil.rmtree(path)


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)
