"""A directory with a minimal Debian of a host's release, from this machine's own apt sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab import apt
from lab.hosts import Host


def command(
    host: Host, root: Path, packages: Sequence[str] = (), options: Sequence[str] = ()
) -> list[str]:
    """The command that makes it in directory ``root``; it takes root, unshare and mmdebstrap.

    Args:
        packages: what is installed besides Debian's required packages.
        options: further ones of mmdebstrap.

    Raises:
        LabUnavailableError: no mirror of Debian is known here.
    """
    # In namespaces of their own: whatever it mounts in the root and starts there is gone with it,
    # however it ends, so that removing a root never walks into the machine's /proc or /dev.
    found = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    found += ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--components=main"]
    found += ["--dpkgopt=force-unsafe-io", *(f"--include={package}" for package in packages)]
    found += [f"--aptopt={option}" for option in apt.transport_options()]
    sources = [source.line() for source in apt.sources_for(host.suite)]
    return [*found, *options, host.suite, str(root), *sources]
