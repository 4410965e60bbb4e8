"""The worker's directories and its lock, made before any privilege is given up."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pwd
import stat
from pathlib import Path

from stockade.platform.errors import StockadeError
from stockade.supervisor.config import WorkerConfig
from stockade.supervisor.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorUser:
    """Who the supervisor runs as once everything that needs root is done.

    Attributes:
        changes: it is another user than the process's own.
        missing: the name that was configured and that this host does not know; empty otherwise.
    """

    uid: int
    gid: int
    changes: bool
    missing: str = ""


def supervisor_user(name: str) -> SupervisorUser:
    """The configured user where we are root; our own user otherwise, or where it does not exist."""
    if os.geteuid() != 0:
        return SupervisorUser(os.geteuid(), os.getegid(), changes=False)
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return SupervisorUser(0, os.getegid(), changes=False, missing=name)
    return SupervisorUser(entry.pw_uid, entry.pw_gid, changes=entry.pw_uid != 0)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerPlaces:
    """The supervisor's own places.

    Attributes:
        own: ``state_dir/worker``.
        lock: descriptor that holds the flock for as long as the process lives.
    """

    own: Path
    lock: int

    @property
    def journal(self) -> Path:
        return self.own / "journal.db"

    @property
    def output(self) -> Path:
        return self.own / "output"


def open_places(config: WorkerConfig, user: SupervisorUser) -> WorkerPlaces:
    """Make what is missing and take the lock.

    Raises:
        ConfigError: a directory cannot be made, or belongs to somebody else.
        StockadeError: another worker has this state_dir.
    """
    root = os.geteuid() == 0
    _make(config.state_dir, 0o711 if root else 0o700)
    _make(config.runtime_dir, 0o755 if root else 0o700)
    for place in (config.state_dir, config.runtime_dir):
        owner = os.stat(place).st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"cannot use {place}: it belongs to uid {owner}, not to {os.geteuid()}; "
                "choose another directory, or change its owner"
            )
    own = config.state_dir / "worker"
    directory = _open_own(own, user)
    try:
        return WorkerPlaces(own, _lock(directory, config.state_dir, user))
    finally:
        os.close(directory)


def _make(path: Path, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode)
        # mkdir's mode went through the umask.
        path.chmod(mode)
    except FileExistsError:
        if not path.is_dir():
            raise ConfigError(f"cannot use {path}: it is not a directory") from None
    except OSError as error:
        raise ConfigError(
            f"cannot make {path}: {error.strerror}; choose a state_dir and runtime_dir that the "
            "worker can write, or make it yourself"
        ) from error


def _open_own(own: Path, user: SupervisorUser) -> int:
    try:
        made = True
        try:
            own.mkdir(0o700)
        except FileExistsError:
            made = False
        # The parent is ours alone; what is inside is the supervisor's, so only by descriptor.
        directory = os.open(own, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot use {own}: {error.strerror}") from error
    if made:
        os.fchmod(directory, 0o700)
        os.fchown(directory, user.uid, user.gid)
    found = os.fstat(directory)
    if found.st_uid != user.uid or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(directory)
        raise ConfigError(
            f"cannot use {own}: it belongs to uid {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}; it must belong to uid {user.uid}, mode 0700: "
            f"chown -R {user.uid}:{user.gid} {own}; chmod 0700 {own}"
        )
    return directory


def _lock(directory: int, state_dir: Path, user: SupervisorUser) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open("lock", flags, 0o600, dir_fd=directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StockadeError(
            f"cannot use {state_dir}: another worker runs in it (pid {holder}); "
            "give each worker a state_dir of its own"
        ) from None
    os.fchown(lock, user.uid, user.gid)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def become(user: SupervisorUser) -> None:
    """Give root up for good. What is needed later must be open, and imported, by now."""
    os.setgroups([user.gid])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
