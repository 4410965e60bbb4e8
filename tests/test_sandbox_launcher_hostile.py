"""The launcher: packets and messages that are not as they should be."""

from __future__ import annotations

import errno
import os
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launcher_driver import (  # noqa: F401 (fixtures)
    USERS,
    Drive,
    Driver,
    drive_fixture,
    launcher_fixture,
    needs_root,
    open_null,
    task_message,
)

from stockade.sandbox import launch_message
from stockade.sandbox.launch_message import (
    HEADER,
    HEADER_FIELDS,
    Flags,
    LaunchMessage,
    Step,
    encode,
)


def test_launcher_whose_channel_closes_ends_in_silence(drive: Drive) -> None:
    driver = drive()
    driver.channel.close()
    assert driver.wait() == 0
    assert driver.record() == []


def test_packet_without_a_message_is_refused(drive: Drive) -> None:
    driver = drive()
    driver.go(b"")
    driver.assert_refused()


@pytest.mark.parametrize("packet", [b"g", b"GG", b"\0", b"G" * 60_000])
def test_another_packet_is_refused(drive: Drive, packet: bytes) -> None:
    driver = drive()
    driver.put(encode(task_message()))
    record = driver.open_record()
    driver.send(packet, [record])
    os.close(record)
    driver.assert_refused()


@pytest.mark.parametrize("packet", [b"G", b"x", b"GG"])
def test_packet_without_a_record_ends_the_launcher(drive: Drive, packet: bytes) -> None:
    driver = drive()
    driver.put(encode(task_message("echo ran")))
    driver.send(packet, [])
    assert driver.wait() == 1
    assert driver.output() == b""


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (Flags(0), 2), (Flags(0), 5), (Flags(0), 6), (Flags(0), 7), (Flags(0), 200),
        (Flags.STDIO, 1), (Flags.STDIO, 2), (Flags.STDIO, 3), (Flags.STDIO, 5),
        (Flags.LANDLOCK, 2), (Flags.STDIO | Flags.LANDLOCK, 5),
    ],
)  # fmt: skip
def test_wrong_number_of_descriptors_is_refused(drive: Drive, flags: Flags, count: int) -> None:
    driver = drive()
    null = open_null()
    driver.go(task_message(flags=flags), [null] * (count - 1))
    os.close(null)
    driver.assert_refused()


def test_second_packet_is_not_read(drive: Drive) -> None:
    driver = drive()
    driver.go(task_message("echo once"))
    driver.go(task_message("echo once"))
    assert driver.output() == b"once\n"
    assert driver.wait() == 0
    assert [line.split()[0] for line in driver.record()] == ["started", "ended"]


@pytest.mark.parametrize("missing", range(9))
def test_launcher_that_lacks_a_descriptor_ends(drive: Drive, missing: int) -> None:
    driver = drive(missing=missing)
    assert driver.wait() == 1
    assert driver.record() == []


def _fields(message: bytes, **changes: int) -> bytes:
    fields = dict(zip(HEADER_FIELDS, HEADER.unpack_from(message), strict=True))
    return HEADER.pack(*(fields | changes).values()) + message[HEADER.size :]


GOOD = encode(
    LaunchMessage(
        program=b"/does/not/exist",
        argv=(b"a", b"b"),
        environment=(b"C=d",),
        directory=b"/",
        rlimits=((resource.RLIMIT_CORE, 1, 1),),
        filter=struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000),  # return SECCOMP_RET_ALLOW
    )
)
STRINGS_BYTES = HEADER.unpack_from(GOOD)[HEADER_FIELDS.index("strings_bytes")]
COUNTS = ("group_count", "rlimit_count", "filter_count", "argc", "envc", "strings_bytes")


def test_message_that_the_hostile_ones_are_made_from_is_good(drive: Drive) -> None:
    driver = drive()
    driver.go(GOOD)
    assert driver.failed() == (Step.EXEC, errno.ENOENT)


@pytest.mark.parametrize(
    "message",
    [
        *(GOOD[:length] for length in (1, 4, 63, 64, 65, len(GOOD) - 1)),
        GOOD + b"\0",
        GOOD + GOOD,
        GOOD[:-1] + b"x",
        bytes(64),
        b"\xff" * 200,
        _fields(GOOD, magic=0),
        _fields(GOOD, version=0),
        _fields(GOOD, version=2),
        _fields(GOOD, reserved=1),
        _fields(GOOD, umask=0o1000),
        _fields(GOOD, flags=Flags.SAME_USER | 64),
        _fields(GOOD, flags=0),
        _fields(GOOD, flags=Flags.SAME_USER | Flags.CHANGE_USER),
        _fields(GOOD, argc=0, envc=3),
        _fields(GOOD, argc=1),
        _fields(GOOD, argc=3),
        _fields(GOOD, argc=2**32 - 1, envc=4),  # the sum wraps to 3
        _fields(GOOD, argc=2**31 + 2, envc=2**31 + 1),
        _fields(GOOD, group_count=2**30),  # 4 times that wraps to 0
        _fields(GOOD, filter_count=2**29 + 1),  # 8 times that wraps to 8
        _fields(GOOD, rlimit_count=0xAAAAAAAB + 1),  # 24 times that is 2**36 + 32
        _fields(GOOD, strings_bytes=STRINGS_BYTES + 1),
        _fields(GOOD, strings_bytes=STRINGS_BYTES - 1),
        _fields(GOOD, strings_bytes=0),
        _fields(GOOD, total_bytes=len(GOOD) + 1),
        _fields(GOOD, total_bytes=len(GOOD) - 1),
        _fields(GOOD + bytes(4), total_bytes=len(GOOD) + 4, group_count=1),
        *(_fields(GOOD, **{name: 2**32 - 1}) for name in ("total_bytes", *COUNTS)),
        *(_fields(GOOD, **{name: 2**31}) for name in ("total_bytes", *COUNTS)),
    ],
)  # fmt: skip
def test_hostile_message_is_refused(drive: Drive, message: bytes) -> None:
    driver = drive()
    driver.go(message)
    driver.assert_refused()


def test_message_that_fills_the_buffer_or_more_is_refused(drive: Drive) -> None:
    for size in (launch_message.MESSAGE_MAX + 1, launch_message.MESSAGE_MAX * 2):
        driver = drive()
        os.truncate(driver.memfd, size)
        driver.go(_fields(GOOD, total_bytes=size, strings_bytes=size - len(GOOD) + STRINGS_BYTES))
        driver.assert_refused()


def test_most_strings_that_are_allowed_fit_the_table(drive: Drive) -> None:
    most = launch_message.STRINGS_MAX
    driver = drive()
    driver.go(task_message(argv=(b"",) * most, environment=(b"",) * most))
    step, number = driver.failed()
    assert (step, number) == (Step.EXEC, errno.E2BIG)
    driver = drive()
    message = encode(task_message(argv=(b"",) * most, environment=(b"",) * most))
    driver.go(_fields(message, argc=most - 1, envc=most + 1))
    driver.assert_refused()


def test_message_that_is_no_file_is_refused(drive: Drive) -> None:
    reader, writer = os.pipe()
    os.write(writer, GOOD)
    driver = drive(message_fd=reader)
    os.close(reader)
    os.close(writer)
    driver.go(GOOD)
    driver.assert_refused()


@needs_root
@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 0}, {"gid": 0}, {"init_uid": 0}, {"init_gid": 0},
        {"uid": 2**32 - 1}, {"gid": 2**32 - 1}, {"init_uid": 2**32 - 1}, {"init_gid": 2**32 - 1},
        {"uid": USERS.init_uid},
    ],
)  # fmt: skip
def test_ids_that_leave_somebody_root_or_alike_are_refused(
    drive: Drive, changes: dict[str, int]
) -> None:
    driver = drive()
    driver.go(_fields(encode(task_message()), **changes))
    driver.assert_refused()


@needs_root
@pytest.mark.parametrize("group", [0, 2**32 - 1])
def test_group_of_root_is_refused(drive: Drive, group: int) -> None:
    message = encode(task_message())
    good = struct.pack("<I", USERS.groups[1])
    assert message.count(good) == 1
    driver = drive()
    driver.go(message.replace(good, struct.pack("<I", group)))
    driver.assert_refused()


def _assert_clean_end(launcher: Path, message: bytes, descriptors: int) -> None:
    driver = Driver(launcher)
    try:
        null = open_null()
        driver.go(message, [null] * descriptors)
        os.close(null)
        code = driver.wait()
        lines = [line.split() for line in driver.record()]
        words = [words[0] for words in lines]
        if code == 1:
            assert words == ["failed"]
            assert lines[0][1] == "message"
        else:
            assert code == 0
            assert words in (["failed"], ["started", "failed"], ["started", "ended"])
        assert b"Sanitizer" not in driver.output()
    finally:
        driver.close()


HOSTILE = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
INTERESTING = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 8, 2**16, 2**18, 2**23, 2**29, 2**30, 2**31 - 1, 2**31]),
    st.integers(0, 64),
    st.integers(2**32 - 64, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@HOSTILE
@given(message=st.binary(max_size=300), descriptors=st.integers(0, 6))
def test_bytes_of_any_kind_end_cleanly(launcher: Path, message: bytes, descriptors: int) -> None:
    _assert_clean_end(launcher, message, descriptors)


@HOSTILE
@given(
    changes=st.dictionaries(st.sampled_from(HEADER_FIELDS), INTERESTING, min_size=1, max_size=4),
    descriptors=st.integers(0, 6),
)
def test_headers_of_any_kind_end_cleanly(
    launcher: Path, changes: dict[str, int], descriptors: int
) -> None:
    _assert_clean_end(launcher, _fields(GOOD, **changes), descriptors)


@HOSTILE
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=8),
    length=st.integers(-8, 8),
    repaired=st.sampled_from(("total_bytes", "both", "none")),
)
def test_damaged_messages_end_cleanly(
    launcher: Path, edits: list[tuple[int, int]], length: int, repaired: str
) -> None:
    damaged = bytearray(GOOD)
    for at, value in edits:
        damaged[at] = value
    message = bytes(damaged[: len(damaged) + length]) + bytes(max(0, length))
    if repaired != "none":
        message = _fields(message, total_bytes=len(message))
    if repaired == "both":
        message = _fields(message, strings_bytes=max(0, STRINGS_BYTES + length))
    _assert_clean_end(launcher, message, 0)
