"""The operator's socket, ``runtime_dir/control.sock``: making it, and reaching it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stockade.supervisor.errors import ConfigError

NAME: Final = "control.sock"
_MAX_PATH_BYTES: Final = 107


def listen_control(runtime_dir: Path, *, group: int | None) -> socket.socket:
    """The listening socket; what an earlier life left of it is replaced.

    Args:
        runtime_dir: a directory that only root, or only our own user, can write.
        group: who besides the owner may use it; None for the owner alone.

    Raises:
        ConfigError: another worker listens there, or it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with control_address(runtime_dir / NAME) as address:
            if _is_served(address):
                raise ConfigError(
                    f"cannot listen on {runtime_dir / NAME}: another worker does; "
                    "give each worker a runtime_dir of its own"
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
            # Before listen(): until then nobody can connect, whatever the umask was.
            os.chmod(address, 0o600 if group is None else 0o660)
            if group is not None:
                os.chown(address, -1, group)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {runtime_dir / NAME}: {error.strerror or error}"
        ) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _is_served(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
        return True


@contextlib.contextmanager
def control_address(path: Path) -> Iterator[str]:
    """A socket address for ``path``: itself, or a short way there when it is too long for one."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
