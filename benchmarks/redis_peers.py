"""RQ and Celery with a redis of their own, and commands sent through them.

Both take as many commands at once as a worker of Stockade does by default. Their ends are awaited
without a poll: RQ's in the stream that it writes results to, Celery's in what it publishes.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ways import UnavailableError, Way
from worker import PREFIX, STATE_ON

AT_ONCE: Final = 4 * (os.cpu_count() or 1)
DEADLINE_S: Final = 60.0
HERE: Final = Path(__file__).parent


class Peer(abc.ABC):
    """One queue with its workers."""

    def __init__(self, socket: str) -> None:
        import redis

        self.socket = socket
        self.redis = redis.Redis(unix_socket_path=socket)

    @abc.abstractmethod
    def command(self) -> list[str]:
        """What starts its workers."""

    @abc.abstractmethod
    def send(self, argv: Sequence[str]) -> str:
        """Sends a command; gives a key for its end."""

    @abc.abstractmethod
    def ended(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys whose commands have succeeded, at least one; waits for it."""

    @abc.abstractmethod
    def printed(self, key: str) -> bytes:
        """What the command of a key that ended last has printed."""

    def burst(self, count: int, in_flight: int, argv: Sequence[str]) -> tuple[float, list[float]]:
        """So many in flight: commands a second, and the seconds of each."""
        times: list[float] = []
        waiting: dict[str, float] = {}
        sent, began = 0, time.perf_counter()
        while len(times) < count:
            while len(waiting) < in_flight and sent < count:
                at = time.perf_counter()
                waiting[self.send(argv)] = at
                sent += 1
            ended = self.ended(list(waiting))
            now = time.perf_counter()
            times += [now - waiting.pop(key) for key in ended]
        return count / (time.perf_counter() - began), times

    def run(self, argv: Sequence[str]) -> float:
        """Seconds from the sending of one to its end."""
        return self.burst(1, 1, argv)[1][0]

    def output(self, argv: Sequence[str]) -> bytes:
        key = self.send(argv)
        self.ended([key])
        return self.printed(key)


class Rq(Peer):
    """A pool of workers, each of which forks for every job."""

    def __init__(self, socket: str) -> None:
        from rq import Queue
        from rq.results import Result

        super().__init__(socket)
        self._queue = Queue(connection=self.redis)
        self._key = Result.get_key
        self._jobs: dict[str, Any] = {}

    def command(self) -> list[str]:
        program = str(Path(sys.executable).parent / "rq")
        address = ("--url", f"unix://{self.socket}")
        return [program, "worker-pool", "--num-workers", str(AT_ONCE), *address, "--quiet"]

    def send(self, argv: Sequence[str]) -> str:
        job = self._queue.enqueue("jobs.run_command", list(argv))
        key = str(self._key(job.id))
        self._jobs = {key: job}
        return key

    def ended(self, keys: Sequence[str]) -> list[str]:
        found: Any = self.redis.xread(dict.fromkeys(keys, "0-0"), block=int(1000 * DEADLINE_S))
        if not found:
            raise TimeoutError(f"RQ has ended none of {len(keys)} jobs")
        streams = found.items() if isinstance(found, dict) else found
        return [key.decode() for key, _ in streams]

    def printed(self, key: str) -> bytes:
        return str(self._jobs[key].return_value()).encode()


class CeleryPrefork(Peer):
    """A pool of processes that were forked beforehand and live on."""

    def __init__(self, socket: str) -> None:
        from celery import Celery

        super().__init__(socket)
        # Without a backend the sender does not subscribe to each result by itself.
        self._app = Celery("sender", broker=f"redis+socket://{socket}")
        self._results = self.redis.pubsub(ignore_subscribe_messages=True)
        self._results.psubscribe("celery-task-meta-*")
        self._printed: dict[str, str] = {}

    def command(self) -> list[str]:
        program = str(Path(sys.executable).parent / "celery")
        pool = ("--pool", "prefork", "--concurrency", str(AT_ONCE))
        return [program, "-A", "celery_app", "worker", *pool, "--loglevel", "ERROR"]

    def send(self, argv: Sequence[str]) -> str:
        return str(self._app.send_task("run_command", [list(argv)]).id)

    def ended(self, keys: Sequence[str]) -> list[str]:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            message = self._results.get_message(timeout=DEADLINE_S)
            if message is None:
                continue
            told = json.loads(message["data"])
            assert told["status"] == "SUCCESS", told
            self._printed = {told["task_id"]: told["result"]}
            if told["task_id"] in keys:
                return [told["task_id"]]
        raise TimeoutError(f"Celery has ended none of {len(keys)} tasks")

    def printed(self, key: str) -> bytes:
        return self._printed[key].encode()


PEERS: Final[dict[str, type[Peer]]] = {"RQ": Rq, "Celery": CeleryPrefork}


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """The socket and pid of a redis with its defaults, but for where it listens and writes."""
    if shutil.which("redis-server") is None:
        raise UnavailableError("no redis-server: apt install redis-server")
    place = tempfile.mkdtemp(prefix=PREFIX, dir=STATE_ON)
    socket = f"{place}/redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", socket, "--dir", place]
    with open(f"{place}/log", "wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        while server.poll() is None and not os.path.exists(socket):
            time.sleep(0.01)
        yield socket, server.pid
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(place)


@contextlib.contextmanager
def peer(name: str, socket: str) -> Iterator[tuple[Peer, int]]:
    """RQ or Celery, when it has run its first command; and the pid of its workers' parent."""
    kind = PEERS[name]
    try:
        made = kind(socket)
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error
    place = tempfile.mkdtemp(prefix=PREFIX, dir=STATE_ON)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(HERE), "BENCHMARK_REDIS": socket, "HOME": place}
    with open(f"{place}/log", "wb") as log:
        workers = subprocess.Popen(
            made.command(), cwd=place, env={**environment, "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        try:
            made.run(("true",))
        except TimeoutError as error:
            raise RuntimeError(f"{error}:\n{Path(place, 'log').read_text()[-2000:]}") from error
        yield made, workers.pid
    finally:
        workers.terminate()
        workers.wait()
        shutil.rmtree(place)


@contextlib.contextmanager
def way(name: str, socket: str) -> Iterator[Way]:
    """RQ or Celery as a way to run a program."""
    with peer(name, socket) as (made, _):
        yield Way(made.run, made.output, every=2)
