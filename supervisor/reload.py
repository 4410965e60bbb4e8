"""Reload: the supervisor executes itself anew, on the installed code and current configuration.

Two steps. In the *rehearsal* a child runs our own command line with the installed code: it reads
the configuration, compares it with what cannot change under running tasks, and answers; when it
says no, nothing has happened. In the *exec* this very process becomes the next life: the sockets
and the lock cross it open, by number, so nobody is refused and nobody else can take them.

The rehearsal is a posix_spawn: unlike after a fork no code of ours runs in the child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import Final, NoReturn

import msgspec

from stockade.platform import memfd, pidfd
from stockade.platform.errors import StockadeError
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.protocol import PROTOCOL_VERSION
from stockade.supervisor.config import Config
from stockade.supervisor.config_defaults import STARTED_BY
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.journal_file import SCHEMA_VERSION

# Not STOCKADE_...: those are keys of the configuration.
VARIABLE: Final = "_STOCKADE_HANDOVER"
REHEARSAL_S: Final = 60.0
# While the next life starts nobody acts on these; they wait until somebody does.
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_MAX_BYTES: Final = 1 << 20
# What the spawner was given by root, and takes from nobody with fewer rights. What tasks see of the
# host, and how containers run, is said by section: values can be secrets.
_FIXED_KEYS: Final = (
    "id", "user", "state_dir", "runtime_dir", "uid_min", "uid_max",
    "memory_max", "cpu_quota", "tasks_max",
)  # fmt: skip
_FIXED_PROFILE: Final = (
    "read_only_paths", "read_write_paths", "inaccessible_paths", "private_network",
)  # fmt: skip


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What one life of the supervisor tells the next. Descriptors cross the exec by number.

    Attributes:
        answer: a rehearsal's way to answer; None when this is the exec itself.
        fixed: what only a restart can change, by key or section, as text.
        spawner_protocol: what the running spawner speaks.
        journal_version: what the journal's file has.
        as_root: the worker was started as root, whoever the supervisor is by now.
        host: found at the first start, while there were the rights to find out.
        listen: of each link, as configured.
        listeners: of each link.
        connections: of schedulers, with no request under way, of each link.
    """

    answer: int | None = None
    fixed: dict[str, str]
    spawner_socket: str
    spawner_protocol: int
    journal_version: int
    as_root: bool
    host: HostCapabilities
    draining: bool = False
    lock: int = -1
    control: int = -1
    listen: dict[str, str | None] = {}
    listeners: dict[str, list[int]] = {}
    connections: dict[str, list[int]] = {}

    @property
    def descriptors(self) -> list[int]:
        found = (*self.listeners.values(), *self.connections.values())
        return [self.lock, self.control, *(fd for each in found for fd in each)]


class _Answer(msgspec.Struct, frozen=True):
    listen: dict[str, str | None] = {}
    error: str = ""


def fixed(config: Config) -> dict[str, str]:
    """The keys that a reload cannot change, with their values."""
    return {
        **{f"worker.{name}": str(getattr(config.worker, name)) for name in _FIXED_KEYS},
        "[profile]": repr([getattr(config.profile, name) for name in _FIXED_PROFILE]),
        "[task.container]": repr(config.task_container),
        # Tasks do not see these files; which, is a part of what they see.
        "[http] or [grpc] token_file or tls_key": repr(
            sorted((name, link.token_file, link.tls_key) for name, link in config.links.items())
        ),
    }


def listen(config: Config) -> dict[str, str | None]:
    """Where each link listens."""
    return {name: link.listen for name, link in config.links.items()}


def receive(environ: MutableMapping[str, str]) -> Handover | None:
    """What the life before left us; None when there was none, or it did not end in a reload.

    Raises:
        StockadeError: another version wrote it, and it cannot be read.
    """
    number = environ.pop(VARIABLE, None)
    if number is None:
        return None
    try:
        handover = msgspec.json.decode(memfd.read_sealed(int(number), _MAX_BYTES), type=Handover)
    except (ValueError, OSError) as error:
        raise StockadeError(
            f"cannot take over from the version that ran before: {error}; restart the worker"
        ) from error
    os.close(int(number))
    if handover.answer is None:
        for fd in handover.descriptors:
            os.set_inheritable(fd, False)
    else:
        os.set_inheritable(handover.answer, False)
    return handover


def check(handover: Handover, config: Config) -> None:
    """Whether this code with this configuration can go on where the old one is.

    Raises:
        ConfigError: a key changed that must not.
        StockadeError: the code cannot work with what runs.
    """
    for name, now in fixed(config).items():
        before = handover.fixed.get(name, now)
        if now != before:
            change = "" if name.startswith("[") else f" from {before} to {now}"
            raise ConfigError(
                f"cannot reload: {name} has changed{change}; that takes a restart of the worker"
            )
    if handover.spawner_protocol != PROTOCOL_VERSION:
        raise StockadeError(
            f"cannot reload: the running spawner speaks protocol {handover.spawner_protocol}, the "
            f"installed code {PROTOCOL_VERSION}, so it could not take the tasks over; let them "
            "end (stockade drain --wait), then restart the worker"
        )
    if handover.journal_version > SCHEMA_VERSION:
        raise StockadeError(
            f"cannot reload: the journal has version {handover.journal_version}, the installed "
            f"code knows {SCHEMA_VERSION}; install a newer one"
        )


def answer(handover: Handover, outcome: Config | StockadeError) -> None:
    """In the rehearsal: say with which configuration it would go on, or why it cannot."""
    assert handover.answer is not None
    if isinstance(outcome, Config):
        told = _Answer(listen=listen(outcome))
    else:
        told = _Answer(error=str(outcome))
    os.write(handover.answer, msgspec.json.encode(told))


async def rehearse(handover: Handover) -> dict[str, str | None]:
    """Where each link of the next life would listen.

    Raises:
        StockadeError: the next life could not go on; the reason is the installed code's own.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    said = os.memfd_create("stockade-rehearsal", os.MFD_CLOEXEC)
    try:
        try:
            pid = _spawn(msgspec.structs.replace(handover, answer=write_end), said)
        finally:
            os.close(write_end)
        child = pidfd.open_pidfd(pid)
        try:
            async with asyncio.timeout(REHEARSAL_S):
                answered = await _read_to_end(read_end)
        except TimeoutError:
            raise StockadeError(
                f"cannot reload: the installed code did not answer within {REHEARSAL_S:.0f} s"
            ) from None
        finally:
            pidfd.send_signal(child, signal.SIGKILL)
            os.close(child)
        if not answered:
            raise StockadeError(f"cannot reload: {_last_words(said)}")
    finally:
        os.close(read_end)
        os.close(said)
    found = msgspec.json.decode(answered, type=_Answer)
    if found.error:
        prefix = "" if found.error.startswith("cannot reload") else "cannot reload: "
        raise StockadeError(prefix + found.error)
    return found.listen


def re_execute(handover: Handover, *, stop_asked: Callable[[], bool]) -> NoReturn:
    """Becomes the next life; returns never.

    Args:
        handover: for the next life.
        stop_asked: whether a signal to stop came that nobody has acted on.

    Raises:
        OSError: the interpreter cannot be executed.
    """
    for fd in handover.descriptors:
        os.set_inheritable(fd, True)
    environment = _environment(handover)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if stop_asked():
        # To this thread, where it stays pending until the next life listens.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    os.execve(sys.executable, sys.orig_argv, environment)


def _spawn(handover: Handover, said: int) -> int:
    assert handover.answer is not None
    environment = _environment(handover)
    passed = int(environment[VARIABLE])
    os.set_inheritable(handover.answer, True)
    try:
        return os.posix_spawn(
            sys.executable, sys.orig_argv, environment,
            file_actions=(
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, said, 1),
                (os.POSIX_SPAWN_DUP2, said, 2),
            ),
            setsigmask=(),
        )  # fmt: skip
    except OSError as error:
        raise StockadeError(f"cannot reload: {sys.executable}: {error.strerror}") from error
    finally:
        os.close(passed)


def _environment(handover: Handover) -> dict[str, str]:
    fd = memfd.sealed_memfd("stockade-handover", msgspec.json.encode(handover))
    os.set_inheritable(fd, True)
    started_by = 0 if handover.as_root else os.getuid()
    return {**os.environ, VARIABLE: str(fd), STARTED_BY: str(started_by)}


def _last_words(said: int) -> str:
    """Why the installed code did not answer: its error, or the end of a usage or traceback."""
    text = os.pread(said, _MAX_BYTES, 0).decode("utf-8", "replace").strip()
    _, mark, error = f"\n{text}".rpartition("\nstockade: ")
    return error if mark else text.rpartition("\n")[2] or "the installed code died"


async def _read_to_end(fd: int) -> bytes:
    """All that comes until the last writer has gone."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    parts: list[bytes] = []

    def readable() -> None:
        try:
            part = os.read(fd, 65536)
        except BlockingIOError:
            return
        if part:
            parts.append(part)
        elif not ended.done():
            ended.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
    return b"".join(parts)
