from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_filesystem import tiny_filesystem

from stockade.platform.errors import StockadeError
from stockade.supervisor.output import CUT_FORM, Capture, Fed, OutputStore
from stockade.supervisor.output_ring import PIECE_BYTES, Ring

needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a tmpfs needs root"
)


@pytest.fixture
def store(tmp_path: Path) -> OutputStore:
    return OutputStore(tmp_path / "output", 1000)


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield read_fd, write_fd
    finally:
        os.close(read_fd)
        with contextlib.suppress(OSError):
            os.close(write_fd)


def drain(capture: Capture, fd: int) -> Fed:
    fed = Fed.MORE
    while fed is Fed.MORE:
        fed = capture.feed(fd)
    return fed


def kept(data: bytes, output_max: int) -> bytes:
    if len(data) <= output_max:
        return data
    head = (output_max + 1) // 2
    tail = output_max - head
    marker = CUT_FORM.format(missing=len(data) - output_max).encode()
    return data[:head] + marker + data[len(data) - tail :]


def test_what_comes_through_the_pipe_is_kept_in_order(store: OutputStore) -> None:
    capture = store.open(7)
    with pipe() as (read_fd, write_fd):
        assert capture.feed(read_fd) is Fed.DRAINED
        os.write(write_fd, b"one\n")
        assert capture.feed(read_fd) is Fed.DRAINED
        os.write(write_fd, b"two\n")
        os.close(write_fd)
        assert drain(capture, read_fd) is Fed.CLOSED
    assert store.read(7) == b"one\ntwo\n"
    assert (capture.total, capture.truncated, capture.stored_bytes) == (8, False, 8)
    assert capture.excerpt(1024) == "one\ntwo\n"
    capture.finish()


def test_a_task_that_prints_nothing_leaves_no_file(store: OutputStore, tmp_path: Path) -> None:
    capture = store.open(1)
    with pipe() as (read_fd, write_fd):
        assert capture.feed(read_fd) is Fed.DRAINED
        os.close(write_fd)
        assert capture.feed(read_fd) is Fed.CLOSED
    assert capture.excerpt(100) == ""
    capture.finish()
    assert list((tmp_path / "output").iterdir()) == []
    assert (store.read(1), store.size(1), store.excerpt(1, 100)) == (b"", 0, "")


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(st.integers(0, 700), max_size=12),
    output_max=st.integers(0, 600),
    resume_at=st.integers(0, 12),
)
def test_head_and_tail_are_the_first_and_last_bytes_of_any_output(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[int],
    output_max: int,
    resume_at: int,
) -> None:
    store = OutputStore(tmp_path_factory.getbasetemp() / "any-output", None)
    content = random.Random(5)
    printed = b""
    capture = store.open(1, output_max)
    for number, length in enumerate(pieces):
        if number == resume_at:  # a supervisor that comes after a crash
            capture.finish()
            capture = store.reopen(1, output_max)
        data = content.randbytes(length)
        printed += data
        capture.write(data)
        assert store.size(1) == len(printed)
    capture.finish()
    assert store.read(1) == kept(printed, output_max)
    assert capture.total == len(printed)
    assert capture.truncated == (len(printed) > output_max)
    assert capture.fault is None


def test_fifty_megabytes_are_cut_with_memory_flat(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, resource, subprocess, sys, select
        from pathlib import Path
        from stockade.supervisor.output import Fed, OutputStore
        capture = OutputStore(Path(sys.argv[1]), 1024 * 1024).open(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        task = subprocess.Popen("head -c 50M /dev/zero | tr '\\\\0' x", shell=True,
                                stdout=subprocess.PIPE)
        fd = task.stdout.fileno()
        os.set_blocking(fd, False)
        fed = Fed.MORE
        while fed is not Fed.CLOSED:
            if fed is Fed.DRAINED:
                select.select([fd], [], [], 30)
            fed = capture.feed(fd)
        task.wait()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(capture.total, capture.truncated, capture.stored_bytes, grown)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "output"], stdout=subprocess.PIPE, check=True
    )
    total, truncated, stored, grown_kib = done.stdout.split()
    assert (int(total), truncated) == (50 * 1024 * 1024, b"True")
    assert int(stored) <= 1024 * 1024 + PIECE_BYTES + 100
    assert int(grown_kib) < 4096
    on_disk = sum(path.stat().st_size for path in (tmp_path / "output").iterdir())
    assert on_disk == int(stored)


def test_one_call_takes_a_bounded_part_of_an_endless_output(store: OutputStore) -> None:
    with open("/dev/zero", "rb", buffering=0) as endless:
        capture = store.open(1)
        assert capture.feed(endless.fileno()) is Fed.MORE
        assert capture.total == 4 * PIECE_BYTES
        capture.finish()


def test_random_bytes_are_recovered_and_give_a_valid_excerpt(store: OutputStore) -> None:
    data = random.Random(1).randbytes(64 * 1024)
    capture = store.open(1, None)
    capture.write(data)
    assert store.read(1) == data
    text = capture.excerpt(1024)
    assert 900 < len(text.encode()) <= 1024
    capture.finish()


def test_the_excerpt_has_the_first_and_the_last_line(store: OutputStore) -> None:
    capture = store.open(1)
    capture.write(b"first\n" + b"x" * 5000 + b"\nlast\n")
    for text in (capture.excerpt(100), store.excerpt(1, 100)):
        assert text.startswith("first\n")
        assert text.endswith("\nlast\n")
        assert "cut: 5012 bytes in all" in text
    capture.finish()


def test_an_unlimited_output_has_an_excerpt_of_both_ends(store: OutputStore) -> None:
    capture = store.open(1, None)
    capture.write(b"first\n" + b"x" * 5000 + b"\nlast\n")
    text = capture.excerpt(100)
    assert text.startswith("first\n")
    assert text.endswith("\nlast\n")
    assert not capture.truncated
    capture.finish()


def test_a_follower_sees_everything_that_is_kept_while_it_is_written(store: OutputStore) -> None:
    capture = store.open(1, None)
    seen = b""
    for number in range(50):
        capture.write(b"line %d\n" % number)
        piece = store.read_from(1, len(seen), 10_000)
        assert piece.offset == len(seen)
        seen += piece.data
        assert piece.total == capture.total
    assert seen == store.read(1)
    assert store.read_from(1, len(seen), 100).data == b""
    capture.finish()


def test_a_slow_follower_is_told_where_it_goes_on_after_a_cut(store: OutputStore) -> None:
    capture = store.open(1, 100)
    capture.write(bytes(range(256)))
    first = store.read_from(1, 0, 1000)
    assert (first.offset, first.data) == (0, bytes(range(50)))
    second = store.read_from(1, 50, 20)
    assert (second.offset, second.data) == (206, bytes(range(206, 226)))
    third = store.read_from(1, 226, 1000)
    assert (third.offset, third.data) == (226, bytes(range(226, 256)))
    assert store.read_from(1, 5000, 10).data == b""
    capture.finish()


def test_a_crash_between_data_and_header_leaves_a_tail_without_mixed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OutputStore(tmp_path / "output", 1000)
    data = random.Random(2).randbytes(5000)
    capture = store.open(1)
    for start in range(0, 4800, 80):
        capture.write(data[start : start + 80])
    with monkeypatch.context() as crash:
        crash.setattr(Ring, "_write_header", lambda ring: None)
        capture.write(data[4800:5000])
    capture.finish()
    assert store.read(1) == kept(data[:4800], 1000)
    assert store.size(1) == 4800


def test_a_supervisor_killed_while_it_stores_leaves_true_bytes(tmp_path: Path) -> None:
    # The output is a counter, so that every stored byte can be told from its place.
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from stockade.supervisor.output import OutputStore
        capture = OutputStore(Path(sys.argv[1]), 40_000).open(1)
        number = 0
        print(flush=True)
        while True:
            capture.write(b"".join(b"%07d\\n" % n for n in range(number, number + 1000)))
            number += 1000
    """)
    directory = tmp_path / "output"
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", script, directory], stdout=subprocess.PIPE)
        assert child.stdout is not None
        with child, child.stdout as ready:
            ready.readline()
            store = OutputStore(directory, 40_000)
            while store.size(1) < 1_000_000:
                pass
            os.kill(child.pid, signal.SIGKILL)
        capture = store.reopen(1)
        total = capture.total
        capture.write(b"end")
        capture.finish()
        head, tail = store.read_from(1, 0, 10**6), store.read_from(1, 20_000, 10**6)
        assert total % 8 == 0
        assert head.data == b"".join(b"%07d\n" % n for n in range(2500))
        assert tail.offset + len(tail.data) == total + 3
        expected = b"".join(b"%07d\n" % n for n in range(tail.offset // 8, total // 8))
        assert tail.data == expected[tail.offset % 8 :] + b"end"


def test_a_fresh_capture_discards_what_lay_under_its_seq(store: OutputStore) -> None:
    old = store.open(1)
    old.write(b"x" * 3000)
    old.finish()
    fresh = store.open(1)
    fresh.write(b"new")
    fresh.finish()
    assert store.read(1) == b"new"


def test_remove_leaves_nothing_and_may_be_repeated(store: OutputStore, tmp_path: Path) -> None:
    capture = store.open(12)
    capture.write(b"x" * 3000)
    capture.finish()
    assert store.seqs() == [12]
    store.remove(12)
    store.remove(12)
    assert list((tmp_path / "output").iterdir()) == []
    assert store.seqs() == []


def test_files_are_for_their_owner_alone(store: OutputStore, tmp_path: Path) -> None:
    capture = store.open(3)
    capture.write(b"x" * 3000)
    capture.finish()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "output").iterdir()}
    assert modes == {"3.head": 0o600, "3.tail": 0o600}
    assert (tmp_path / "output").stat().st_mode & 0o777 == 0o700


def test_no_descriptor_builds_up(store: OutputStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for seq in range(50):
        capture = store.open(seq)
        capture.write(b"x" * 3000)
        capture.excerpt(100)
        capture.finish()
        capture.finish()
        store.reopen(seq).finish()
    assert len(os.listdir("/proc/self/fd")) == before


@needs_mount
def test_a_full_disk_loses_output_says_so_and_never_raises(tmp_path: Path) -> None:
    with tiny_filesystem(tmp_path / "tiny", 256 * 1024) as directory:
        store = OutputStore(directory / "output", 10 * 1024 * 1024)
        capture = store.open(1)
        with open("/dev/zero", "rb", buffering=0) as endless:
            for _ in range(20):
                capture.feed(endless.fileno())
        assert capture.total == 20 * 4 * PIECE_BYTES
        assert capture.truncated
        assert capture.fault == os.strerror(28)
        assert store.size(1) > 0
        assert capture.excerpt(100)
        capture.finish()


@needs_mount
def test_the_tail_goes_on_when_the_disk_has_room_again(tmp_path: Path) -> None:
    with tiny_filesystem(tmp_path / "tiny", 512 * 1024) as directory:
        store = OutputStore(directory / "output", 300_000)
        capture = store.open(1)
        capture.write(b"a" * 1000)
        filler = directory / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        capture.write(b"b" * 200_000)
        assert capture.fault
        filler.unlink()
        capture.write(b"c" * 100_000)
        capture.finish()
        assert capture.truncated
        assert store.size(1) == capture.total == 301_000
        assert store.read(1).startswith(b"a" * 1000)
        assert store.read(1).endswith(b"c" * 30_000)
        reopened = store.reopen(1)
        assert reopened.total == 301_000
        reopened.finish()


def test_a_file_size_limit_loses_output_and_never_raises(tmp_path: Path) -> None:
    store = OutputStore(tmp_path / "output", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        capture = store.open(1)
        capture.write(b"x" * 25_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capture.fault == os.strerror(27)
    assert capture.total == 25_000
    assert store.read(1).startswith(b"x" * 10_000)
    capture.finish()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(StockadeError, match=r"cannot create the output directory .*absent"):
        OutputStore(tmp_path / "absent" / "output", 1000)


def test_an_output_that_cannot_be_read_is_named(store: OutputStore, tmp_path: Path) -> None:
    (tmp_path / "output" / "5.head").mkdir()
    with pytest.raises(StockadeError, match="cannot read the output of task 5"):
        store.read(5)
