"""The recipe of a host's disk: Debian packages, a virtual environment, an ext4 image.

Whatever changes here makes new images: the cache's key covers this file.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab import debian_root, wheels
from lab.errors import LabError, LabUnavailableError
from lab.hosts import LAB, Host, read_list

PACKAGES: Final = LAB / "packages-guest.txt"
# Copied over the root before packages are configured, and at the end.
EARLY_OVERLAY: Final = LAB / "overlay.early"
OVERLAY: Final = LAB / "overlay"
DISK_BYTES: Final = 8 << 30  # sparse
VENV: Final = "/opt/stockade"
# Work that a test machine has no use for, at a time when it disturbs.
MASKED_UNITS: Final = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "systemd-pcrphase.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-firstboot.service",
)


def make(host: Host, work: Path, cache: Path) -> None:
    """Makes disk.img, vmlinuz and initrd.img of ``host`` in ``work``/image.

    Raises:
        LabUnavailableError: a program, a package source or root is missing here.
        LabError: a step failed; its words are on stderr.
    """
    if os.geteuid() != 0:
        raise LabUnavailableError(
            f"cannot make the image of {host.name}: it takes root; "
            f"run `tests/lab/lab build {host.name}` as root with the same STOCKADE_LAB_CACHE"
        )
    for program in ("mmdebstrap", "mke2fs", "unshare"):
        if shutil.which(program) is None:
            raise LabUnavailableError(
                f"cannot make the image of {host.name}: {program} is not installed; "
                "install what tests/lab/packages-machine.txt lists"
            )
    root, files = work / "root", work / "wheels"
    with _step(host, "dependencies"):
        wheels.download(host, files, cache)
    with _step(host, "packages"):
        # Before the kernel is configured, so that its initramfs is made once and small.
        early = f'--essential-hook=cp -r {shlex.quote(str(EARLY_OVERLAY))}/. "$1"'
        _run(debian_root.command(host, root, read_list(PACKAGES), [early]))
    with _step(host, "virtual environment"):
        _install_wheels(root, files)
    with _step(host, "disk"):
        _finish(host, root)
        result = work / "image"
        result.mkdir()
        # The boot loader's part: qemu is given the kernel and its initramfs directly.
        shutil.copyfile(root / "vmlinuz", result / "vmlinuz")
        shutil.copyfile(root / "initrd.img", result / "initrd.img")
        disk = result / "disk.img"
        disk.touch()
        os.truncate(disk, DISK_BYTES)
        _run(["mke2fs", "-q", "-t", "ext4", "-L", "lab", "-m", "0", "-d", str(root), str(disk)])


def _install_wheels(root: Path, files: Path) -> None:
    inside = root / "wheels"
    files.rename(inside)
    pip = [f"{VENV}/bin/pip", "install", "--quiet", "--no-index", "--find-links", "/wheels"]
    for command in (
        ["python3", "-m", "venv", VENV],
        # Without isolation a source is built with what is there already.
        [*pip, "setuptools", "wheel"],
        [*pip, "--no-build-isolation", *wheels.requirements()],
    ):
        _run_inside(root, command)
    shutil.rmtree(inside)


def _finish(host: Host, root: Path) -> None:
    shutil.copytree(OVERLAY, root, dirs_exist_ok=True)
    (root / "etc/hostname").write_text(f"{host.name}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {host.name}\n")
    (root / "etc/fstab").write_text("")
    # Empty: systemd makes one at the first boot.
    (root / "etc/machine-id").write_text("")
    _run_inside(root, ["systemctl", "--quiet", "enable", "stockade-lab.service"])
    _run_inside(root, ["systemctl", "--quiet", "mask", *MASKED_UNITS])


def _run_inside(root: Path, command: list[str]) -> None:
    # Without the machine's environment: its pip configuration, for one, must not reach in.
    clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"]
    _run([*clean, "chroot", str(root), *command])


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode != 0:
        raise LabError(f"cannot make the image: {' '.join(command[:6])} ... failed")


@contextlib.contextmanager
def _step(host: Host, name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    _say(f"{host.name}: {name}: {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr, flush=True)
