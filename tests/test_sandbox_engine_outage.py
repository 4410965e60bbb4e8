"""Container tasks whose engine is away for a while, with a client that plays one."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawner_client import SpawnerClient, eventually
from worker_process import make_place

from stockade.sandbox.engine import EngineSettings
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode
from stockade.sandbox.protocol import Container

# Its container lives on when its client ends. Files say what is so: the engine is away, the
# container was stopped, it was removed; and what it was asked.
PROGRAM = """#!/bin/sh
here=${0%/*}
echo "$3 $4" >>$here/asked
case "$3 $4" in
"run "*)
    exit 1 ;;
"container inspect")
    [ ! -e $here/away ] || { echo "cannot connect" >&2; exit 1; }
    [ ! -e $here/removed ] || { echo "no such container" >&2; exit 1; }
    if [ -e $here/stopped ]
    then echo '{"Status": "exited", "StartedAt": "2026-01-01T00:00:00Z", "ExitCode": 143}'
    else echo '{"Status": "running", "StartedAt": "2026-01-01T00:00:00Z", "ExitCode": 0}'
    fi
    echo '{}' ;;
"container stop" | "container kill")
    : >$here/stopped ;;
"container rm")
    : >$here/removed ;;
esac
"""


@dataclasses.dataclass(frozen=True)
class Engine:
    place: Path
    client: SpawnerClient

    def was_asked(self, what: str) -> bool:
        asked = self.place / "asked"
        return asked.exists() and what in asked.read_text()

    def run(self, limits: Limits) -> None:
        self.client.start(1, ["true"], limits, environment=(), container=Container("image", "id"))
        # The client is over, and whether the container is cannot be known.
        eventually(lambda: self.was_asked("container inspect"))

    def come_back(self) -> None:
        (self.place / "away").unlink()


@pytest.fixture
def engine() -> Iterator[Engine]:
    place = make_place()
    program = place / "docker"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (place / "away").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "socket"))
        listener.listen()
        settings = EngineSettings(program=str(program), socket=str(place / "socket"))
        client = SpawnerClient(engine=settings)
        try:
            yield Engine(place, client)
        finally:
            client.close()
            shutil.rmtree(place)


def test_deadline_that_falls_into_an_outage_of_the_engine_holds_after_it(engine: Engine) -> None:
    engine.run(Limits(runtime_max=0.5))
    # The next look is after the deadline, and the one after that too.
    looks = (engine.place / "asked").read_text().count("inspect")
    eventually(lambda: (engine.place / "asked").read_text().count("inspect") > looks + 1)
    engine.come_back()
    outcome = engine.client.wait_ended(1)
    assert outcome.error_code is ErrorCode.TIMEOUT
    assert engine.was_asked("container stop")


def test_cancel_that_falls_into_an_outage_of_the_engine_holds_after_it(engine: Engine) -> None:
    engine.run(Limits(runtime_max=None))
    engine.client.cancel(1)
    # Taken before this is answered.
    engine.client.send_list()
    engine.come_back()
    assert engine.client.wait_ended(1).error_code is ErrorCode.CANCELLED
    assert engine.was_asked("container stop")
