"""What schedulers are told, over each link."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from both_links import SCHEDULERS, make_scheduler
from link_lab import ACK, BEAT, REGISTER, TIMED_OUT, telling
from recording_scheduler import Behaviour, CutBody, Drip, Drop, Hang

from stockade.supervisor.links.link import ReplyKind
from stockade.supervisor.links.two_way import TwoWayLink
from stockade.supervisor.wire.messages import ACK_PATH

over_each_link = pytest.mark.parametrize("name", SCHEDULERS)


@over_each_link
def test_messages_go_over_one_kept_connection(tmp_path: Path, name: str) -> None:
    async def body(link: TwoWayLink) -> None:
        for _ in range(5):
            assert (await link.send_ack("", ACK)).kind is ReplyKind.OK

    with make_scheduler(name) as scheduler:
        telling(name, tmp_path, scheduler.url, body)
        assert {message.connection for message in scheduler.messages} == {1}
        assert "authorization" not in scheduler.messages[0].headers


@over_each_link
def test_a_kept_connection_that_closes_is_replaced_at_once(tmp_path: Path, name: str) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK
        scheduler.misbehave(Drop(), times=1)
        assert (await link.send_ack("", ACK)).kind is ReplyKind.OK

    with make_scheduler(name) as scheduler:
        telling(name, tmp_path, scheduler.url, body)
        assert [message.connection for message in scheduler.messages] == [1, 1, 2]


@over_each_link
def test_the_token_is_sent(tmp_path: Path, name: str) -> None:
    async def body(link: TwoWayLink) -> None:
        await link.send_ack("", ACK)

    with make_scheduler(name) as scheduler:
        telling(name, tmp_path, scheduler.url, body, token="s3cret")
        assert scheduler.messages[0].headers["authorization"] == "Bearer s3cret"


@over_each_link
@pytest.mark.parametrize("behaviour", [Hang(), Drop(), CutBody(), Drip()], ids=repr)
def test_lost_contact_is_no_success(tmp_path: Path, name: str, behaviour: Behaviour) -> None:
    async def body(link: TwoWayLink) -> None:
        reply = await link.send_report("", TIMED_OUT)
        assert (reply.kind, reply.silent) == (ReplyKind.RETRY, True), reply
        assert reply.reason
        scheduler.behave()
        assert (await link.send_report("", TIMED_OUT)).kind is ReplyKind.OK

    with make_scheduler(name) as scheduler:
        scheduler.misbehave(behaviour)
        telling(name, tmp_path, scheduler.url, body, report__attempt_timeout=0.5)


@over_each_link
def test_a_scheduler_that_is_down_is_silence_and_is_called_again_when_it_is_back(
    tmp_path: Path, name: str
) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.heartbeat(BEAT)).kind is ReplyKind.UNKNOWN  # not registered, but there
        await asyncio.to_thread(scheduler.stop)
        reply = await link.heartbeat(BEAT)
        assert (reply.kind, reply.silent) == (ReplyKind.RETRY, True)
        await asyncio.to_thread(scheduler.start)
        assert (await link.register(REGISTER)).kind is ReplyKind.OK

    with make_scheduler(name) as scheduler:
        telling(name, tmp_path, scheduler.url, body)


@pytest.mark.parametrize(("name", "ending"), [("http", ""), ("http", "/"), ("grpc", "")])
def test_a_dispatch_may_name_its_scheduler(tmp_path: Path, name: str, ending: str) -> None:
    async def body(link: TwoWayLink) -> None:
        assert (await link.send_ack(other.url + ending, ACK)).kind is ReplyKind.OK

    with make_scheduler(name) as scheduler, make_scheduler(name) as other:
        telling(name, tmp_path, scheduler.url, body)
        assert [message.path for message in scheduler.messages] == []
        assert [message.path for message in other.messages] == [ACK_PATH]


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("http", ""), ("http", "http://a b:99999999/"), ("grpc", ""), ("grpc", "no address")],
)
def test_a_scheduler_that_is_none_refuses(tmp_path: Path, name: str, scheduler: str) -> None:
    async def body(link: TwoWayLink) -> None:
        reply = await link.send_ack(scheduler, ACK)
        assert reply.kind is ReplyKind.REFUSED
        assert reply.reason

    telling(name, tmp_path, "", body)
