"""The scheduler as a process: where it listens, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import aiohttp
import pytest
from scheduler_lab import DEADLINE_S, post, scheduler_process, spawn

from stockade.supervisor.scheduler.errors import SettingsError
from stockade.supervisor.scheduler.settings import (
    default_state_dir,
    make_settings,
    parse_listen,
    plain_address,
)


async def refused(*arguments: str) -> tuple[int, str]:
    """Exit status and complaint of a scheduler that does not start."""
    process = await spawn(*arguments, stderr=asyncio.subprocess.PIPE)
    try:
        out, complaint = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out == b""
    assert process.returncode is not None
    return process.returncode, complaint.decode()


def test_port_0_takes_a_free_port_on_loopback_and_prints_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with scheduler_process(tmp_path / "new" / "dir") as scheduler:
            assert scheduler.url.startswith("http://127.0.0.1:")
            assert not scheduler.url.endswith(":0")
        assert stat.S_IMODE((tmp_path / "new" / "dir").stat().st_mode) == 0o700

    asyncio.run(main())


def test_sigterm_ends_it_with_0_and_ends_waiting_requests(tmp_path: Path) -> None:
    async def main() -> None:
        async with scheduler_process(tmp_path) as scheduler:
            async with aiohttp.ClientSession() as session:
                _, task = await post(session, f"{scheduler.url}/v1/tasks", {"payload": "x"})
            host = scheduler.url.removeprefix("http://")
            reader, writer = await asyncio.open_connection(*host.split(":"))
            try:
                # Both in one packet: once the first is answered, the second has been read.
                for path in ("/healthz", f"/v1/tasks/{task['id']}?wait=300"):
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                async with asyncio.timeout(DEADLINE_S):
                    await reader.readuntil(b'{"status":"ok"}')
                    assert await scheduler.stop() == 0
                    answer = await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"status":"queued"' in answer

    asyncio.run(main())


def test_a_port_in_use_is_exit_1_with_the_port_and_the_way_out(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            status, complaint = await refused("--listen", address, "--state-dir", str(tmp_path))
        assert status == 1
        assert f"cannot listen on {address}: port in use" in complaint
        assert "--listen" in complaint
        assert complaint.count("\n") == 1

    asyncio.run(main())


def test_a_second_scheduler_on_the_same_state_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with scheduler_process(tmp_path):
            status, complaint = await refused("--listen", ":0", "--state-dir", str(tmp_path))
        assert (status, "another scheduler runs on it" in complaint) == (1, True)

    asyncio.run(main())


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_a_wider_bind_is_refused_until_networks_are_allowed(tmp_path: Path, listen: str) -> None:
    async def main() -> None:
        status, complaint = await refused("--listen", listen, "--state-dir", str(tmp_path))
        assert (status, "--allow-networks" in complaint) == (78, True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--listen", "8080"), 78, "127.0.0.1:8080"),
        (("--listen", "127.0.0.1:99999"), 78, "127.0.0.1:8080"),
        (("--listen", "::1:8080"), 78, "[::1]:8080"),
        (("--listen", "198.51.100.7:0", "--allow-networks", "10.0.0.0/8"), 1, "198.51.100.7"),
        (("--listen", ":0", "--allow-networks", "10.0.0.0/99"), 78, "10.0.0.0/8"),
        (("--listen", ":0", "--state-dir", "/dev/null/x"), 1, "--state-dir"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    async def main() -> None:
        ended, complaint = await refused("--state-dir", str(tmp_path), *arguments)
        assert (ended, complaint.count("\n")) == (status, 1)
        assert complaint.startswith("stockade scheduler: cannot ")
        assert words in complaint

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
    ],
)
def test_an_address_without_host_is_loopback(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


def test_networks_with_host_bits_are_refused() -> None:
    with pytest.raises(SettingsError, match="host bits"):
        make_settings(":0", "/tmp/x", ["10.0.0.1/8"])


def test_a_mapped_address_is_the_ipv4_address_in_it() -> None:
    assert str(plain_address("::ffff:10.0.0.1")) == "10.0.0.1"
    assert str(plain_address("fe80::1%eth0")) == "fe80::1"
    assert plain_address("name") is None


def test_the_default_directory_is_a_subdirectory_of_stockades_own() -> None:
    assert default_state_dir({"XDG_STATE_HOME": "/s", "HOME": "/h"}).endswith("stockade/scheduler")
