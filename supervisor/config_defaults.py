"""Defaults that depend on the host and on who runs the worker."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from stockade.supervisor.errors import ConfigError

NAME: Final = "stockade"
FILE_NAME: Final = "stockade.toml"
# Set by a worker for its next life: who the first one was started by, whoever it has become.
STARTED_BY: Final = "_STOCKADE_STARTED_BY"


def default_file(environ: Mapping[str, str], *, uid: int | None = None) -> Path | None:
    """The configuration file that is used when none is named; None when it does not exist.

    Args:
        environ: the environment, for XDG_CONFIG_HOME and HOME.
        uid: whose; when None the process's, or who started the first life of this worker.

    Raises:
        ConfigError: whether it exists cannot be found out.
    """
    if _uid(uid, environ) == 0:
        path = Path("/etc") / NAME / FILE_NAME
    else:
        base = _base_directory(environ, "XDG_CONFIG_HOME", ".config", _uid(uid, environ))
        if base is None:
            return None
        path = base / NAME / FILE_NAME
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # A configuration that is there but hidden from us must not turn into the defaults.
        raise ConfigError(
            f"cannot read configuration {path}: {error.strerror}; run as a user who can,"
            " or name another file with --config"
        ) from error
    return path


def host_defaults(
    environ: Mapping[str, str], *, uid: int | None = None
) -> dict[str, Callable[[], Any]]:
    """What makes the default of each key that has none of its own, by dotted name.

    They are called only for keys that are set nowhere, so a host without a home directory, say,
    does not matter to a configuration that names its directories.
    """
    user = _uid(uid, environ)
    return {
        "worker.id": _worker_id,
        "worker.state_dir": lambda: _state_dir(environ, user),
        "worker.runtime_dir": lambda: _runtime_dir(environ, user),
        # The CPUs that we may use, not those that the host has.
        "worker.max_concurrency": lambda: 4 * len(os.sched_getaffinity(0)),
    }


def _uid(uid: int | None, environ: Mapping[str, str]) -> int:
    return int(environ.get(STARTED_BY, os.geteuid())) if uid is None else uid


def _worker_id() -> str:
    # A host's name may hold what a worker's id may not, and must not stop the worker.
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:64].lstrip(".-")
    return name or "worker"


def _state_dir(environ: Mapping[str, str], uid: int) -> Path:
    if uid == 0:
        return Path("/var/lib") / NAME
    base = _base_directory(environ, "XDG_STATE_HOME", ".local/state", uid)
    if base is None:
        raise ConfigError(
            f"cannot find a state directory: uid {uid} has no home directory;"
            " set worker.state_dir (STOCKADE_WORKER_STATE_DIR)"
        )
    return base / NAME


def _runtime_dir(environ: Mapping[str, str], uid: int) -> Path:
    if uid == 0:
        return Path("/run") / NAME
    base = _absolute(environ.get("XDG_RUNTIME_DIR", ""))
    return Path(f"/tmp/{NAME}-{uid}") if base is None else base / NAME


def _base_directory(
    environ: Mapping[str, str], variable: str, below_home: str, uid: int
) -> Path | None:
    base = _absolute(environ.get(variable, ""))
    if base is not None:
        return base
    home = _absolute(environ.get("HOME", "")) or _absolute(_home_of(uid))
    return None if home is None else home / below_home


def _absolute(text: str) -> Path | None:
    # The XDG base directory specification: a relative path is ignored.
    return Path(text) if text.startswith("/") else None


def _home_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""
