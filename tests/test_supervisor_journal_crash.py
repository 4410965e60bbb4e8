"""The journal on real files under real trouble: kills, full disks, damage, foreign files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_lab import unfinished_seqs, with_journal
from tiny_filesystem import tiny_filesystem

from stockade.sandbox.outcome import Outcome, Status
from stockade.supervisor import journal_file
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import JournalError
from stockade.supervisor.journal import Journal
from stockade.supervisor.states import State

SUCCESS = Outcome(Status.SUCCESS, exit_code=0)
PAGE_BYTES = 4096
# Of payloads: kept in the row, and apart from it.
SHORT, LONG = 1500, 3000
NAME_OF_ID = b'"instance_id"'
needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a tmpfs needs root"
)

# Says on its standard output what the journal answered, one line a transition, until it is killed.
WRITER = textwrap.dedent("""
    import asyncio, os, sys
    from pathlib import Path
    from stockade.sandbox.outcome import Outcome, Status
    from stockade.supervisor.dispatch import Dispatch
    from stockade.supervisor.journal import Journal
    from stockade.supervisor.states import State

    async def main():
        journal = await Journal.open(Path(sys.argv[1]))
        def say(*words):
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())
        async def work(worker):
            number = 0
            while True:
                number += 1
                name = f"{os.getpid()}-{worker}-{number}"
                payload = "x" * (number % 7 * 1000)
                accepted = await journal.accept(Dispatch(instance_id=name, payload=payload))
                seq = accepted.row.seq
                say(seq, "accepted", name)
                await journal.start(seq)
                say(seq, "running", name)
                await journal.finish(seq, Outcome(Status.SUCCESS, exit_code=number % 256), name)
                say(seq, "finished", name)
                if number % 3:
                    await journal.deliver(seq)
                    say(seq, "delivered", name)
                if number % 20 == 0:
                    await journal.sweep(0.05, 0.2)
        await asyncio.gather(*(work(worker) for worker in range(16)))

    asyncio.run(main())
""")
ORDER = ["accepted", "running", "finished", "delivered"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * PAGE_BYTES):
            pass


def killed_writer(path: Path, lines: int) -> list[str]:
    """What a writer said before it was killed after so many lines, in the middle of its commits."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout as output:
        said = [output.readline() for _ in range(lines)]
        os.kill(child.pid, signal.SIGKILL)
        said += output.readlines()
    whole = [line.decode().strip() for line in said if line.endswith(b"\n")]
    assert len(whole) >= lines
    return whole


def test_what_was_answered_outlives_sigkill_in_the_middle_of_commits(path: Path) -> None:
    latest: dict[int, tuple[str, str]] = {}
    for round_number in range(6):
        for line in killed_writer(path, 100 + 137 * round_number):
            seq, state, name = line.split()
            assert int(seq) not in latest or latest[int(seq)][1] == name  # no number twice
            latest[int(seq)] = (state, name)

        async def check(journal: Journal) -> None:
            assert journal.damaged is None
            for seq, (state, name) in latest.items():
                row = await journal.row(seq)
                if row is None:  # swept out of the history
                    assert state == "delivered"
                    continue
                assert row.dispatch.instance_id == name
                assert ORDER.index(row.state) >= ORDER.index(state)
                if row.state in {State.FINISHED, State.DELIVERED}:
                    assert row.excerpt == name
                    assert row.outcome is not None
            # No payload is left behind by a task that is gone, none is missing.
            for row in await journal.unfinished():
                number = int(row.dispatch.instance_id.rsplit("-", 1)[1])
                assert len(row.dispatch.payload) == number % 7 * 1000

        with_journal(path, check)


def test_any_end_of_the_log_opens_as_some_moment_of_the_past(path: Path, tmp_path: Path) -> None:
    """A host that loses power leaves the log cut anywhere: whole commits are all there is."""
    killed_writer(path, 400)
    wal = path.with_name("journal.db-wal").read_bytes()
    assert len(wal) > 20 * PAGE_BYTES
    chance = random.Random(3)
    seen: list[tuple[int, int]] = []
    for number in range(25):
        directory = tmp_path / str(number)
        directory.mkdir()
        copy = shutil.copy(path, directory)
        length = chance.randrange(len(wal) + 1)
        Path(f"{copy}-wal").write_bytes(wal[:length])

        async def check(journal: Journal) -> int:
            assert journal.damaged is None
            rows = await journal.recent(100_000)
            for row in rows:
                assert (row.outcome is not None) == (row.state in {State.FINISHED, State.DELIVERED})
            return len(rows)

        seen.append((length, with_journal(Path(copy), check)))
    assert max(count for _, count in seen) > 0


@needs_mount
def test_a_full_disk_refuses_what_it_cannot_hold_and_recovers_by_itself(tmp_path: Path) -> None:
    async def body(journal: Journal) -> None:
        running = (await journal.accept(Dispatch(instance_id="running"))).row.seq
        fill(directory / "filler")
        answers = await asyncio.gather(
            *(
                journal.accept(Dispatch(instance_id=str(number), payload="x" * 100_000))
                for number in range(50)
            ),
            return_exceptions=True,
        )
        refused = [
            number for number, answer in enumerate(answers) if answer.__class__ is JournalError
        ]
        assert refused
        assert "free space on its file system" in str(answers[refused[0]])
        assert journal.fault is not None
        # Reading goes on, and nothing is half done.
        names = {row.dispatch.instance_id for row in await journal.unfinished()}
        assert names == {"running"} | {str(number) for number in range(50) if number not in refused}
        (directory / "filler").unlink()
        await until(lambda: journal.fault is None)
        await journal.finish(running, SUCCESS, "done")
        assert (await journal.accept(Dispatch(instance_id=str(refused[0])))).is_new
        assert journal.damaged is None

    with tiny_filesystem(tmp_path / "tiny", 2 * 1024 * 1024) as directory:
        with_journal(directory / "journal.db", body)
        with_journal(directory / "journal.db", Journal.unfinished)


@needs_mount
def test_a_disk_that_is_full_at_start_is_named_and_nothing_is_set_aside(tmp_path: Path) -> None:
    with tiny_filesystem(tmp_path / "tiny", 512 * 1024) as directory:
        fill(directory / "filler")
        with pytest.raises(JournalError, match="free space"):
            with_journal(directory / "journal.db", Journal.unfinished)
        (directory / "filler").unlink()
        assert with_journal(directory / "journal.db", Journal.unfinished) == []
        assert os.listdir(directory) == ["journal.db"]


def test_a_file_size_limit_refuses_and_recovers(path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, resource, sys
        from pathlib import Path
        from stockade.supervisor.dispatch import Dispatch
        from stockade.supervisor.errors import JournalError
        from stockade.supervisor.journal import Journal
        from journal_lab import unfinished_seqs

        async def main():
            journal = await Journal.open(Path(sys.argv[1]))
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
            taken = []
            refusal = None
            for number in range(100):
                dispatch = Dispatch(instance_id=str(number), payload="x" * 20_000)
                try:
                    taken.append((await journal.accept(dispatch)).row.seq)
                except JournalError as error:
                    refusal = error
                    break
            assert taken and refusal and journal.fault, refusal
            assert "file size limit" in str(refusal), refusal
            assert await unfinished_seqs(journal) == taken
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert (await journal.accept(dispatch)).is_new
            assert journal.fault is None
            assert len(await unfinished_seqs(journal)) == len(taken) + 1
            await journal.close()
            print("recovered")

        asyncio.run(main())
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, path], stdout=subprocess.PIPE, check=True,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == b"recovered"
    assert with_journal(path, unfinished_seqs)


@needs_mount
def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    with tiny_filesystem(tmp_path / "tiny", 1024 * 1024) as directory:
        with_journal(directory / "journal.db", Journal.unfinished)
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
        for name in ("journal.db", "another.db"):
            with pytest.raises(JournalError, match="Read-only file system; its directory must"):
                with_journal(directory / name, Journal.unfinished)


def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, os, sys
        from pathlib import Path
        from stockade.supervisor.errors import JournalError
        from stockade.supervisor.journal import Journal
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        try:
            asyncio.run(Journal.open(Path(sys.argv[1])))
        except JournalError as error:
            print(error)
    """)
    with_journal(tmp_path / "journal.db", Journal.unfinished)
    for directory in (tmp_path, *list(tmp_path.parents)[:2]):
        directory.chmod(0o711)
    tmp_path.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path / "fresh.db"],
            stdout=subprocess.PIPE,
            check=True,
        )
    finally:
        tmp_path.chmod(0o700)
    assert b"Permission denied; its directory must exist and be writable" in done.stdout


def test_a_program_that_ends_without_closing_is_not_held_up(path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from stockade.supervisor.dispatch import Dispatch
        from stockade.supervisor.journal import Journal

        async def main():
            journal = await Journal.open(Path(sys.argv[1]))
            await journal.accept(Dispatch(instance_id="kept"))

        asyncio.run(main())
    """)
    subprocess.run([sys.executable, "-c", script, path], check=True, timeout=60)
    assert len(with_journal(path, unfinished_seqs)) == 1


def test_an_absent_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="No such file or directory"):
        with_journal(tmp_path / "absent" / "journal.db", Journal.unfinished)


def test_a_journal_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    with_journal(path, lambda journal: journal.accept(Dispatch(instance_id="a")))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=99")
    before = path.read_bytes()
    with pytest.raises(JournalError, match="a newer Stockade wrote it"):
        with_journal(path, Journal.unfinished)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["journal.db"]


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(JournalError, match="another program's"):
        with_journal(path, Journal.unfinished)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]


def test_a_second_worker_on_the_same_journal_is_refused(path: Path) -> None:
    async def body(_: Journal) -> None:
        with pytest.raises(JournalError, match="a state_dir of its own"):
            await Journal.open(path)

    with_journal(path, body)


def test_a_journal_whose_creation_was_cut_short_is_made_anew(path: Path) -> None:
    path.touch()
    assert with_journal(path, Journal.unfinished) == []
    assert os.listdir(path.parent) == ["journal.db"]


async def add_tasks(journal: Journal, count: int = 400) -> dict[State, list[int]]:
    """A file of some hundred pages with tasks in every state that matters."""
    seqs: dict[State, list[int]] = {State.ACCEPTED: [], State.RUNNING: [], State.FINISHED: []}

    async def add(number: int) -> None:
        state = list(seqs)[number % 3]
        accepted = await journal.accept(
            Dispatch(instance_id=str(number), payload="x" * (LONG if number % 8 == 0 else SHORT)),
            initial=State.RUNNING if state is State.RUNNING else State.ACCEPTED,
        )
        if state is State.FINISHED:
            await journal.finish(accepted.row.seq, SUCCESS, str(number))
        seqs[state].append(accepted.row.seq)

    await asyncio.gather(*(add(number) for number in range(count)))
    await journal.set_meta("spawner_token", "old")
    return seqs


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"garbage" * 100)


def damage_pages(path: Path) -> None:
    pages = path.stat().st_size // PAGE_BYTES
    with path.open("r+b") as file:
        for page in range(pages // 2, pages // 2 + 3):
            file.seek(page * PAGE_BYTES)
            file.write(random.Random(page).randbytes(PAGE_BYTES))


def damage_texts(path: Path) -> None:
    """What rows hold, some in short and some whole; the database itself stays in order."""
    first, *others = path.read_bytes().split(NAME_OF_ID)
    damaged = (
        b'"instance_\xff\xff"' if number % 9 == 0 else NAME_OF_ID for number in itertools.count()
    )
    path.write_bytes(first + b"".join(a + b for a, b in zip(damaged, others, strict=False)))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_part_of_a_page(path: Path) -> None:
    os.truncate(path, 1000)


def empty_beside_a_log(path: Path) -> None:
    os.truncate(path, 0)
    path.with_name("journal.db-wal").write_bytes(b"x" * 5000)


@pytest.mark.parametrize("full_check_bytes", [journal_file.FULL_CHECK_BYTES, 0])
@pytest.mark.parametrize(
    ("damage", "is_salvaged"),
    [
        (damage_header, False),
        (damage_pages, True),
        (damage_texts, True),
        (cut_in_half, True),
        (cut_to_part_of_a_page, False),
        (empty_beside_a_log, False),
    ],
)
def test_a_damaged_journal_is_set_aside_and_what_can_be_read_goes_on(
    path: Path,
    damage: Callable[[Path], None],
    is_salvaged: bool,
    full_check_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_file, "FULL_CHECK_BYTES", full_check_bytes)
    seqs = with_journal(path, add_tasks)
    damage(path)
    remains = {
        name.removeprefix(path.name): (path.parent / name).read_bytes()
        for name in os.listdir(path.parent)
    }
    highest = max(max(group) for group in seqs.values())

    async def body(journal: Journal) -> None:
        assert journal.damaged is not None
        assert journal.damaged.name.startswith("journal.db.damaged-")
        # As they were found, with nothing beside them that looking at them makes.
        assert remains == {
            name.removeprefix(journal.damaged.name): (path.parent / name).read_bytes()
            for name in os.listdir(path.parent)
            if name.startswith(journal.damaged.name)
        }
        # Another spawner's word would be needed to call a task unstarted: none is remembered.
        assert await journal.get_meta("spawner_token") is None
        fresh = await journal.accept(Dispatch(instance_id="fresh"))
        assert fresh.row.seq > highest
        rows = [row for row in await journal.recent(1000) if row.seq != fresh.row.seq]
        assert (len(rows) > 50) == is_salvaged
        whole = 0
        for row in rows:
            # What reads as accepted may have run since: it must never run again.
            (before,) = [state for state, group in seqs.items() if row.seq in group]
            expected = State.RUNNING if before is State.ACCEPTED else before
            assert row.state is expected
            found = await journal.row(row.seq)
            assert found is not None
            if int(row.dispatch.instance_id) % 8:
                assert found.dispatch.payload == "x" * SHORT
            whole += found.dispatch.payload == "x" * LONG
            assert not (await journal.accept(row.dispatch)).is_new
        assert (whole > 5) == is_salvaged

    with_journal(path, body)
    # Once is enough: the next start finds a journal in order.
    with_journal(path, check_in_order)


async def check_in_order(journal: Journal) -> None:
    assert journal.damaged is None


def test_two_damaged_journals_in_one_second_keep_both(path: Path) -> None:
    for _ in range(3):
        with_journal(path, add_tasks)
        damage_header(path)
    with_journal(path, Journal.unfinished)
    assert len([name for name in os.listdir(path.parent) if ".damaged-" in name]) == 3


def test_damage_while_running_is_refused_once_and_then_work_goes_on(path: Path) -> None:
    async def fill_file(journal: Journal) -> None:
        # More than SQLite's cache holds.
        await asyncio.gather(
            *(
                journal.accept(Dispatch(instance_id=str(number), payload="x" * 1500))
                for number in range(9000)
            )
        )

    async def body(journal: Journal) -> None:
        seqs = await unfinished_seqs(journal)
        damage_pages(path)
        answers = await asyncio.gather(
            *(journal.start(seq) for seq in seqs), return_exceptions=True
        )
        assert any(isinstance(answer, JournalError) for answer in answers)
        assert journal.damaged is not None
        assert (await journal.accept(Dispatch(instance_id="fresh"))).is_new
        assert journal.fault is None
        left = await journal.unfinished()
        assert len(left) > 3000
        # This process wrote these states: they are true.
        assert {row.state for row in left} == {State.ACCEPTED, State.RUNNING}
        await journal.finish(left[0].seq, SUCCESS, "")

    with_journal(path, fill_file)
    with_journal(path, body)
    with_journal(path, check_in_order)


def test_the_age_of_the_journal_keeps_fresh_numbers_apart(path: Path) -> None:
    """Records and outputs are named by seq and may outlive a journal that was deleted."""
    before = time.time_ns() // 1000
    first = with_journal(path, lambda journal: journal.accept(Dispatch(instance_id="a")))
    path.unlink()
    second = with_journal(path, lambda journal: journal.accept(Dispatch(instance_id="a")))
    assert before < first.row.seq < second.row.seq
