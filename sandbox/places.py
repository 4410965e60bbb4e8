"""The spawner's directories, opened once by descriptor and never followed by path again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
from typing import Final, Self

from stockade.platform import locks, proc
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.settings import SpawnerSettings

_IN_CHARGE: Final = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Descriptors of directories, and their paths for those who cannot take a descriptor.

    Attributes:
        work: ``state_dir/work``: one directory a slot in it.
        spawner: ``runtime_dir/spawner``: sockets.
        record: ``runtime_dir/spawner/record``: one record a task.
        output: ``runtime_dir/spawner/output``: one FIFO a slot.
        locks: the file ``runtime_dir/spawner/lock``: byte 0 is locked by the spawner in charge,
            byte N by the spawner of generation N, for as long as it lives.
        token: names this life of the record directory; see protocol.Welcome.
    """

    work_path: str
    spawner_path: str
    work: int
    spawner: int
    record: int
    output: int
    locks: int
    token: str

    @classmethod
    def open(cls, settings: SpawnerSettings) -> Self:
        """Makes what is missing and opens all.

        Raises:
            SandboxSetupError: one cannot be made, belongs to somebody else, or cannot be entered
                by tasks.
        """
        work_path = os.path.join(settings.state_dir, "work")
        spawner_path = os.path.join(settings.runtime_dir, "spawner")
        work = _directory(work_path, 0o711)
        if os.geteuid() == 0:
            _check_reachable(work_path)
        # Only the socket in here is for the supervisor, and sockets have modes of their own.
        spawner = _directory(spawner_path, 0o711)
        record = _directory(os.path.join(spawner_path, "record"), 0o700)
        output = _directory(os.path.join(spawner_path, "output"), 0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        # Never opened a second time: closing any descriptor of the file would give the locks up.
        lock_fd = os.open("lock", flags, 0o600, dir_fd=spawner)
        return cls(work_path, spawner_path, work, spawner, record, output, lock_fd, _token(spawner))

    def take_charge(self) -> bool:
        """Makes this process the one that starts tasks here; False when another one is."""
        return locks.lock_byte_as_process(self.locks, _IN_CHARGE)

    def give_up_charge(self) -> None:
        """Lets another spawner take charge; this one's generation stays locked."""
        locks.unlock_byte_as_process(self.locks, _IN_CHARGE)

    def lock_generation(self, generation: int) -> bool:
        """Says, for as long as this process lives, that this generation does."""
        return locks.lock_byte_as_process(self.locks, generation)

    def other_generations(self) -> dict[int, int]:
        """The pids of the other spawners that live, by generation."""
        return locks.processes_that_locked(self.locks, _IN_CHARGE + 1)

    def work_directory(self, slot: str) -> str:
        """The path of a slot's work directory."""
        return os.path.join(self.work_path, slot)


def generations(runtime_dir: str) -> list[int]:
    """N of every ``spawner/N.sock`` that is there, of a live spawner or a dead one; newest first.

    Raises:
        PermissionError: the directory is not ours to list.
    """
    try:
        names = os.listdir(os.path.join(runtime_dir, "spawner"))
    except FileNotFoundError:
        return []
    stems = (name.removesuffix(".sock") for name in names if name.endswith(".sock"))
    return sorted((int(stem) for stem in stems if stem.isdigit()), reverse=True)


def _directory(path: str, mode: int) -> int:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SandboxSetupError(
            f"open {path}", f"{error.strerror}: make it writable for the worker's user"
        ) from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        os.close(fd)
        raise SandboxSetupError(
            f"use {path}",
            f"it belongs to uid {found.st_uid}, not to {os.geteuid()}: "
            "choose another state_dir or runtime_dir, or remove it",
        )
    # mkdir's mode went through the umask, and an older directory may be wider than it should be.
    os.fchmod(fd, mode)
    return fd


def _check_reachable(path: str) -> None:
    """A task's own uid must be able to enter its work directory: every parent needs o+x."""
    parent = path
    while parent != "/":
        parent = os.path.dirname(parent)
        if not stat.S_IMODE(os.stat(parent).st_mode) & stat.S_IXOTH:
            raise SandboxSetupError(
                f"use {path} for tasks",
                f"{parent} cannot be entered by other users: "
                f"chmod o+x {parent}, or choose another state_dir",
            )


def _token(spawner: int) -> str:
    """The text in ``spawner/token``, made once a boot."""
    boot_id = proc.boot_id()
    try:
        fd = os.open("token", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=spawner)
    except FileNotFoundError:
        pass
    else:
        with open(fd, encoding="ascii") as file:
            token = file.read()
        if token.startswith(boot_id + " ") and len(token) > len(boot_id) + 1:
            return token
    token = f"{boot_id} {os.urandom(8).hex()}"
    fd = os.open(
        "token.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600,
        dir_fd=spawner,
    )  # fmt: skip
    os.write(fd, token.encode())
    os.close(fd)
    os.rename("token.new", "token", src_dir_fd=spawner, dst_dir_fd=spawner)
    return token
