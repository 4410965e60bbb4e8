"""Container tasks that are over before an engine hears of them: each is told, and stops nobody."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from injection import Fault, attached, needs_strace
from recording_scheduler import RecordingScheduler
from spawner_client import SpawnerClient
from worker_process import DEADLINE_S, WorkerProcess

from stockade.sandbox.engine import EngineSettings
from stockade.sandbox.outcome import ErrorCode, Outcome
from stockade.sandbox.protocol import Container

NO_ENGINE = EngineSettings(program="/bin/false", socket="/dev/null/socket")


@pytest.fixture
def client() -> Iterator[SpawnerClient]:
    client = SpawnerClient(engine=NO_ENGINE)
    yield client
    client.close()


def refused(client: SpawnerClient, seq: int, *words: str) -> Outcome:
    client.start(seq, list(words), environment=(), container=Container("image", "id"))
    return client.wait_ended(seq)


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (("--env", "A" * 100_000), "--env AAAA"),
        (("--volume", f"/{'a/' * 50_000}:/x"), "/a/a/a"),
        (("--\udcff",), "flag --? is not allowed"),
        (("--volume", "/\udcff\n:/x"), "below none of task.container.volumes"),
    ],
    ids=["variable", "volume", "flag", "volume_bytes"],
)
def test_refusal_of_words_of_any_length_and_bytes_is_told(
    client: SpawnerClient, words: tuple[str, ...], quoted: str
) -> None:
    outcome = refused(client, 1, *words)
    assert outcome.error_code is ErrorCode.INVALID_REQUEST
    assert quoted in outcome.reason
    assert "\n" not in outcome.reason
    assert client.run(2, "echo on")[1] == b"on\n"


def test_refused_container_with_a_long_word_does_not_cut_the_worker_off_from_its_spawner(
    scheduler: RecordingScheduler, make_worker: Callable[..., WorkerProcess]
) -> None:
    worker = make_worker(extra='[task.container]\nengine = "false"\nsocket = "/dev/null/socket"')
    scheduler.dispatch(
        worker.url, schedule_instance_id="long", task_type="container", image="image",
        payload="--env " + "A" * 100_000,
    )  # fmt: skip
    report = scheduler.terminal_report("long", DEADLINE_S)
    assert (report["status"], report["error_code"]) == ("failed", "invalid_request")
    scheduler.dispatch(worker.url, schedule_instance_id="next", payload="echo on")
    assert scheduler.terminal_report("next", DEADLINE_S)["error_message"] == "on\n"


@needs_strace
@pytest.mark.skipif(os.geteuid() != 0, reason="strace of a spawner needs root")
def test_container_for_which_no_descriptor_is_left_to_reach_its_engine_is_told(
    client: SpawnerClient,
) -> None:
    with attached(client.welcome.pid, Fault("socket", 1, "EMFILE", times=60000)):
        outcome = refused(client, 1, "true")
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert "cannot reach the container engine" in outcome.reason
    assert "Too many open files" in outcome.reason
    assert client.run(2, "echo on")[1] == b"on\n"
