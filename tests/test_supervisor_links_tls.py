"""TLS, mutual TLS and their renewal, each over both links and in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from both_links import SCHEDULERS, make_scheduler
from certificates import Authority
from grpclib.exceptions import StreamTerminatedError
from recording_scheduler import RecordingScheduler
from structlog.testing import capture_logs
from worker_process import DEADLINE_S, WorkerProcess, eventually

from stockade.supervisor.config import Config
from stockade.supervisor.config_load import load
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.links import tls
from stockade.supervisor.links.link import ReplyKind
from stockade.supervisor.links.listeners import open_listeners
from stockade.supervisor.links.running import make_links, read_link_credentials
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.wire.messages import AckRequest, ExecuteRequest
from stockade.supervisor.worker import view_of

ALPN = {"http": "http/1.1", "grpc": "h2"}
ACK = AckRequest(schedule_instance_id="task-1", worker_id="w1")
# What a caller meets whose handshake fails, at once or with its first read.
REFUSED = (OSError, StreamTerminatedError)

pytestmark = pytest.mark.parametrize("link", SCHEDULERS)


class CountingIntake:
    def __init__(self) -> None:
        self.dispatches: list[str | None] = []

    async def execute(self, request: ExecuteRequest, link: str) -> None:
        self.dispatches.append(request.schedule_instance_id)

    async def cancel(self, instance_id: str) -> bool:
        return False


def config(directory: Path, link: str, **keys: object) -> Config:
    overrides: dict[str, object] = {
        "worker.id": "w1",
        "worker.state_dir": str(directory),
        "worker.runtime_dir": str(directory),
        "http.listen": "",
        "report.attempt_timeout": 5.0,
        f"{link}.listen": "127.0.0.1:0",
    }
    overrides.update({f"{link}.{key}": str(value) for key, value in keys.items()})
    return load(None, {"HOME": str(directory)}, overrides).config


@contextlib.asynccontextmanager
async def served(
    directory: Path, link: str, intake: CountingIntake, **keys: object
) -> AsyncIterator[TwoWayLink]:
    settings = config(directory, link, **keys)
    (made,) = make_links(
        settings,
        intake,
        metrics=bytes,
        credentials=read_link_credentials(settings),
        task_uids=None,
    ).values()
    await made.start(open_listeners("127.0.0.1:0", link))
    try:
        yield made
    finally:
        await made.close()


def serving(
    directory: Path,
    link: str,
    body: Callable[[TwoWayLink, CountingIntake], Coroutine[Any, Any, None]],
    **keys: object,
) -> CountingIntake:
    async def run() -> CountingIntake:
        intake = CountingIntake()
        async with served(directory, link, intake, **keys) as made:
            await body(made, intake)
        return intake

    # As the worker does: the loop of the standard library resets a connection that it accepted in
    # the very turn in which its server was closed.
    return uvloop.run(run())


async def dispatch(made: TwoWayLink, instance_id: str, **settings: Any) -> int:
    """Call as a scheduler with these settings: the answer's status."""

    def call() -> int:
        with make_scheduler(made.name, **settings) as scheduler:
            scheme = "https" if settings.get("caller_tls") else "http"
            url = str(made.bound) if made.name == "grpc" else f"{scheme}://{made.bound}"
            return scheduler.dispatch(url, schedule_instance_id=instance_id, payload="true")[0]

    return await asyncio.to_thread(call)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def others(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "others")


# The listener.


def test_a_listener_with_a_certificate_takes_tls_only_from_callers_who_trust_it(
    tmp_path: Path, link: str, ours: Authority, others: Authority
) -> None:
    async def body(made: TwoWayLink, _: CountingIntake) -> None:
        assert await dispatch(made, "a", caller_tls=ours.client(ALPN[link])) == 202
        with pytest.raises(REFUSED):
            await dispatch(made, "b", caller_tls=others.client(ALPN[link]))
        with pytest.raises(REFUSED):
            await dispatch(made, "c")
        told = await made.advertised()
        assert told.grpc_addr == str(made.bound) or told.callback_url == f"https://{made.bound}"

    cert, key = ours.issue("worker")
    assert serving(tmp_path, link, body, tls_cert=cert, tls_key=key).dispatches == ["a"]


def test_a_caller_must_show_a_certificate_of_tls_client_ca(
    tmp_path: Path, link: str, ours: Authority, others: Authority
) -> None:
    async def body(made: TwoWayLink, _: CountingIntake) -> None:
        def shown(cert: tuple[Path, Path] | None) -> Any:
            return ours.client(ALPN[link], cert=cert)

        assert await dispatch(made, "a", caller_tls=shown(ours.issue("caller"))) == 202
        for cert in (None, others.issue("stranger")):
            with pytest.raises(REFUSED):
                await dispatch(made, "b", caller_tls=shown(cert))

    cert, key = ours.issue("worker")
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ours.file}
    assert serving(tmp_path, link, body, **files).dispatches == ["a"]


def test_a_token_is_asked_for_over_tls_too(tmp_path: Path, link: str, ours: Authority) -> None:
    async def body(made: TwoWayLink, _: CountingIntake) -> None:
        context = ours.client(ALPN[link])
        assert await dispatch(made, "a", caller_tls=context, token="s3cret") == 202
        assert await dispatch(made, "b", caller_tls=context, token="wrong") == 401
        assert await dispatch(made, "c", caller_tls=context) == 401

    cert, key = ours.issue("worker")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    files = {"tls_cert": cert, "tls_key": key, "token_file": token}
    assert serving(tmp_path, link, body, **files).dispatches == ["a"]


# The client.


def told(
    directory: Path, link: str, scheduler: RecordingScheduler, **keys: object
) -> tuple[ReplyKind, str]:
    """What becomes of an ack that is sent to this scheduler."""
    found = []

    async def body(made: TwoWayLink, _: CountingIntake) -> None:
        found.append(await made.send_ack("", ACK))

    serving(directory, link, body, scheduler=scheduler.url, **keys)
    return found[0].kind, found[0].reason


def test_a_scheduler_is_trusted_by_tls_ca_alone(
    tmp_path: Path, link: str, ours: Authority, others: Authority
) -> None:
    with make_scheduler(link, tls=ours.server("scheduler", ALPN[link])) as scheduler:
        assert told(tmp_path, link, scheduler, tls_ca=ours.file) == (ReplyKind.OK, "")
        for keys in ({"tls_ca": others.file}, {}):
            kind, reason = told(tmp_path, link, scheduler, **keys)
            assert kind is ReplyKind.RETRY
            assert "certificate" in reason.lower()
        assert len(scheduler.messages) == 1


def test_a_scheduler_of_another_name_is_not_trusted(
    tmp_path: Path, link: str, ours: Authority
) -> None:
    context = ours.server("scheduler", ALPN[link])
    context.load_cert_chain(*ours.issue("elsewhere", host="elsewhere.example"))
    with make_scheduler(link, tls=context) as scheduler:
        kind, reason = told(tmp_path, link, scheduler, tls_ca=ours.file)
        assert kind is ReplyKind.RETRY
        assert "mismatch" in reason.lower() or "not valid for" in reason.lower()
        assert not scheduler.messages


def test_the_worker_shows_its_certificate_to_a_scheduler_that_asks(
    tmp_path: Path, link: str, ours: Authority
) -> None:
    context = ours.server("scheduler", ALPN[link], client_ca=ours.file)
    with make_scheduler(link, tls=context) as scheduler:
        assert told(tmp_path, link, scheduler, tls_ca=ours.file)[0] is ReplyKind.RETRY
        assert not scheduler.messages
        cert, key = ours.issue("worker")
        files = {"tls_cert": cert, "tls_key": key, "tls_ca": ours.file}
        assert told(tmp_path, link, scheduler, **files) == (ReplyKind.OK, "")


# Renewal.


async def until(look: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await look():
            await asyncio.sleep(0.02)


def test_a_renewed_certificate_and_authority_are_used_for_new_connections_without_a_restart(
    tmp_path: Path, link: str, ours: Authority, others: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.05)
    before = ours.client(ALPN[link], cert=ours.issue("caller"))
    after = others.client(ALPN[link], cert=others.issue("new-caller"))
    authority = tmp_path / "callers.pem"
    authority.write_bytes(ours.file.read_bytes())

    async def body(made: TwoWayLink, intake: CountingIntake) -> None:
        assert await dispatch(made, "before", caller_tls=before) == 202
        others.issue("worker")
        authority.write_bytes(others.file.read_bytes())

        async def renewed() -> bool:
            try:
                return await dispatch(made, "after", caller_tls=after) == 202
            except REFUSED:
                return False

        await until(renewed)
        with pytest.raises(REFUSED):
            await dispatch(made, "before", caller_tls=before)

    cert, key = ours.issue("worker")
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority}
    assert serving(tmp_path, link, body, **files).dispatches == ["before", "after"]


def test_a_renewal_refuses_no_connection(
    tmp_path: Path, link: str, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.01)

    async def body(made: TwoWayLink, intake: CountingIntake) -> None:
        context = ours.client(ALPN[link])
        with capture_logs() as lines:
            number = 0
            while len([line for line in lines if line["event"] == "certificates renewed"]) < 5:
                ours.issue("worker")
                number += 1
                assert await dispatch(made, f"t{number}", caller_tls=context) == 202

    cert, key = ours.issue("worker")
    serving(tmp_path, link, body, tls_cert=cert, tls_key=key)


def test_a_scheduler_with_another_authority_is_trusted_once_tls_ca_is_replaced(
    tmp_path: Path, link: str, ours: Authority, others: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.05)
    authority = tmp_path / "scheduler.pem"
    authority.write_bytes(others.file.read_bytes())

    with make_scheduler(link, tls=ours.server("scheduler", ALPN[link])) as scheduler:

        async def body(made: TwoWayLink, _: CountingIntake) -> None:
            assert (await made.send_ack("", ACK)).kind is ReplyKind.RETRY
            authority.write_bytes(ours.file.read_bytes())

            async def trusted() -> bool:
                return (await made.send_ack("", ACK)).kind is ReplyKind.OK

            await until(trusted)

        serving(tmp_path, link, body, scheduler=scheduler.url, tls_ca=authority)


def test_a_pair_that_does_not_fit_leaves_the_old_one_in_force_and_is_told_once(
    tmp_path: Path, link: str, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.02)
    cert, key = ours.issue("worker")

    async def body(made: TwoWayLink, _: CountingIntake) -> None:
        context = ours.client(ALPN[link])
        with capture_logs() as lines:

            def events() -> list[Any]:
                return [line["event"] for line in lines if "certificates" in line["event"]]

            async def told_of() -> bool:
                return bool(events())

            key.write_text("half of a")
            await until(told_of)
            assert await dispatch(made, "a", caller_tls=context) == 202
            await asyncio.sleep(0.2)
            assert events() == ["certificates not renewed, the old ones stay"]
            ours.issue("worker")

            async def renewed() -> bool:
                return events()[-1] == "certificates renewed"

            await until(renewed)
            assert await dispatch(made, "b", caller_tls=context) == 202

    serving(tmp_path, link, body, tls_cert=cert, tls_key=key)


def test_files_that_could_not_be_read_for_a_moment_are_read_at_the_next_look(
    link: str, ours: Authority
) -> None:
    cert, key = ours.issue("worker")
    files = tls.TlsFiles(cert=cert, key=key)
    certificates = tls.Certificates(files, alpn=ALPN[link], section=link)
    before = certificates.server
    ours.issue("worker")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(ConfigError):
            certificates.refresh()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert certificates.server is before
    assert certificates.refresh()
    assert certificates.server is not before


def test_files_that_cannot_be_used_are_refused_naming_key_and_file(
    tmp_path: Path, link: str, ours: Authority
) -> None:
    cert, key = ours.issue("worker")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    _, other_key = ours.issue("other")
    for keys, named in (
        ({"tls_cert": nonsense, "tls_key": key}, "tls_cert"),
        ({"tls_cert": cert, "tls_key": other_key}, "tls_key"),
        ({"tls_ca": nonsense}, "tls_ca"),
        ({"tls_cert": cert, "tls_key": key, "tls_client_ca": nonsense}, "tls_client_ca"),
    ):
        with pytest.raises(ConfigError, match=rf"cannot use {link}\.(tls_cert .*)?{named}"):
            read_link_credentials(config(tmp_path, link, **keys))


def test_tasks_see_neither_the_key_nor_the_token(
    tmp_path: Path, link: str, ours: Authority
) -> None:
    cert, key = ours.issue("worker")
    token = tmp_path / "token"
    token.write_text("s3cret")
    overrides = {
        "worker.state_dir": str(tmp_path / "state"),
        "worker.runtime_dir": str(tmp_path / "run"),
        f"{link}.listen": "127.0.0.1:0",
        f"{link}.tls_cert": str(cert),
        f"{link}.tls_key": str(key),
        f"{link}.token_file": str(token),
    }
    hidden = view_of(load(None, {"HOME": str(tmp_path)}, overrides)).inaccessible_paths
    assert {str(key), str(token)} <= set(hidden)


# A whole worker.


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_worker_with_mutual_tls_and_a_token_both_ways_runs_tasks_and_renews(
    place: Path, link: str, user: str
) -> None:
    if os.geteuid() != 0 and user != "root":
        pytest.skip("only root can become another user")
    ours = Authority(place, "ours")
    others = Authority(place, "others")
    cert, key = ours.issue("worker")
    authorities = place / "authorities.pem"
    authorities.write_bytes(ours.file.read_bytes())
    authorities.chmod(0o644)
    (place / "token").write_text("s3cret\n")
    (place / "token").chmod(0o600)
    alpn = ALPN[link]
    settings: dict[str, Any] = {
        "tls": ours.server("scheduler", alpn, client_ca=ours.file),
        "caller_tls": ours.client(alpn, cert=ours.issue("caller")),
        "token": "s3cret",
    }
    with make_scheduler(link, **settings) as scheduler:
        worker = WorkerProcess(
            scheduler.url,
            link=link,
            worker=f'user = "{user}"',
            lines=f"""
            heartbeat_interval = 0.2
            tls_cert = "{cert}"
            tls_key = "{key}"
            tls_ca = "{ours.file}"
            tls_client_ca = "{authorities}"
            token_file = "{place}/token"
            """,
        )
        try:
            worker.start()
            assert worker.process is not None
            registration = scheduler.wait_for(lambda s: s.workers, DEADLINE_S)[0]
            url = scheduler.callback(registration)
            scheduler.dispatch(url, schedule_instance_id="a", payload="echo secured")
            report = scheduler.terminal_report("a", DEADLINE_S)
            assert report["error_message"] == "secured\n"
            assert {m.headers["authorization"] for m in scheduler.messages} == {"Bearer s3cret"}
            # From now on the worker is one of the others, and only they may call it.
            others.issue("worker")
            authorities.write_bytes(others.file.read_bytes())
            new_caller = others.client(alpn, cert=others.issue("new-caller"))
            with make_scheduler(link, caller_tls=new_caller, token="s3cret") as other:

                def taken() -> bool:
                    try:
                        status, _ = other.dispatch(
                            url, schedule_instance_id="b", payload="echo renewed"
                        )
                    except REFUSED:
                        return False
                    return status == 202

                eventually(taken)
            eventually(lambda: "certificates renewed" in worker.log)
            assert worker.process.poll() is None
        finally:
            worker.close()
