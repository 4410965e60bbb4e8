"""Puts the scheduler together and serves it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import time
from typing import Final, Self

import structlog
import uvloop
from aiohttp import web

from stockade.supervisor.scheduler.api import TaskApi
from stockade.supervisor.scheduler.changes import Changes
from stockade.supervisor.scheduler.dispatcher import Dispatcher
from stockade.supervisor.scheduler.errors import ListenError, SettingsError, StoreError
from stockade.supervisor.scheduler.guards import guards
from stockade.supervisor.scheduler.settings import Settings, plain_address
from stockade.supervisor.scheduler.store import Store
from stockade.supervisor.scheduler.worker_api import WorkerApi
from stockade.supervisor.scheduler.workers import Workers
from stockade.supervisor.wire.messages import MAX_DISPATCH_BYTES

_BACKLOG: Final = 1024
_CLOSE_WAIT_S: Final = 2.0
_REMOVE_AT_ONCE: Final = 500

_log = structlog.get_logger(__name__)


class Scheduler:
    """A running scheduler. It lives in the caller's event loop until `close`."""

    def __init__(self, settings: Settings, listener: socket.socket, store: Store) -> None:
        self._settings = settings
        self._listener = listener
        self._store = store
        self._changes = Changes()
        self._workers = Workers(offline_after_s=settings.offline_after_s)
        self._dispatcher = Dispatcher(
            store,
            self._workers,
            self._changes,
            answer_timeout_s=settings.answer_timeout_s,
        )
        app = web.Application(middlewares=guards(settings), client_max_size=MAX_DISPATCH_BYTES)
        app.add_routes(WorkerApi(self._workers, self._dispatcher).routes())
        app.add_routes(TaskApi(store, self._workers, self._dispatcher, self._changes).routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_WAIT_S)
        self._scan: asyncio.Task[None] | None = None
        self._resources = contextlib.ExitStack()

    @classmethod
    async def start(cls, settings: Settings) -> Self:
        """A scheduler that listens.

        Raises:
            SettingsError: the address is wider than loopback and no network is allowed.
            ListenError: the address cannot be listened on.
            StoreError: the state directory cannot be used.
        """
        with contextlib.ExitStack() as resources:
            listener = resources.enter_context(_listen(settings))
            _lock(settings.state_dir, resources)
            store = await Store.open(os.path.join(settings.state_dir, "scheduler.db"))
            scheduler = cls(settings, listener, store)
            scheduler._resources = resources.pop_all()
        try:
            await scheduler._runner.setup()
            await web.SockSite(scheduler._runner, listener, backlog=_BACKLOG).start()
            scheduler._dispatcher.start()
            scheduler._scan = asyncio.get_running_loop().create_task(scheduler._scan_for_ever())
        except BaseException:
            await scheduler.close()
            raise
        return scheduler

    @property
    def url(self) -> str:
        """Where it listens, with the port it got."""
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Stops taking requests, ends those that wait, and closes the store."""
        self._changes.close()
        if self._scan is not None:
            self._scan.cancel()
            await asyncio.gather(self._scan, return_exceptions=True)
        await self._runner.cleanup()
        await self._dispatcher.close()
        await self._store.close()
        self._resources.close()

    async def _scan_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scan_interval_s)
            try:
                self._workers.mark_offline()
                await self._store.remove_ended(
                    time.time() - self._settings.history_s, _REMOVE_AT_ONCE
                )
            except StoreError as error:
                _log.error("cannot remove old tasks", error=str(error))
            except Exception:  # noqa: BLE001 - nothing else ever looks
                _log.exception("a fault in the look at workers and old tasks")


def run(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT. Prints the URL when requests are taken.

    Raises:
        SettingsError: as for `Scheduler.start`.
        ListenError: the same.
        StoreError: the same.
    """
    # Standard output has the URL alone, for whoever starts us on port 0.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    scheduler = await Scheduler.start(settings)
    try:
        print(f"stockade scheduler: {scheduler.url}", flush=True)
        await stop.wait()
    finally:
        await scheduler.close()


def _listen(settings: Settings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {settings.host}:{settings.port}: {error}. "
            "Give an address of this host with --listen"
        ) from error
    family, kind, protocol, _, address = found[0]
    ip = plain_address(str(address[0]))
    if not settings.allow_networks and (ip is None or not ip.is_loopback):
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port}: whoever reaches the scheduler can "
            "run tasks. Say who may with --allow-networks 10.0.0.0/8, or listen on 127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = "port in use. Choose another with --listen, or port 0 for a free one"
        else:
            reason = f"{error.strerror}. Choose another address with --listen"
        raise ListenError(f"cannot listen on {settings.host}:{settings.port}: {reason}") from error
    return listener


def _lock(state_dir: str, resources: contextlib.ExitStack) -> None:
    """Makes the directory and holds it: two schedulers on one store would send everything twice."""
    try:
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
        descriptor = os.open(
            os.path.join(state_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        resources.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreError(
            f"cannot use {state_dir}: another scheduler runs on it. Name another --state-dir"
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot use {state_dir}: {error.strerror}. Name another --state-dir"
        ) from error
