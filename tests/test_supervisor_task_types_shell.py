"""Shell tasks by way of a real executor and spawner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from executor_lab import ExecutorLab, Life

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.dispatch import Dispatch
from stockade.supervisor.errors import RejectedError
from stockade.supervisor.process_plan import FILES_MAX, MAX_STRING_BYTES, ProcessPlan
from stockade.supervisor.task_types.shell import PAYLOAD_FILE, ShellTask


@pytest.fixture(scope="module")
def lab() -> Iterator[ExecutorLab]:
    executor_lab = ExecutorLab()
    yield executor_lab
    executor_lab.close()


def run(
    lab: ExecutorLab, instance_id: str, payload: str, interpreter: tuple[str, ...] = (),
    **fields: Any,
) -> tuple[Outcome, str]:  # fmt: skip
    """How the task ends, and the excerpt of its output."""
    found: list[tuple[Outcome, str]] = []

    async def body(life: Life) -> None:
        if interpreter:
            life.types["shell"] = shell(interpreter)
        await life.dispatch(instance_id, payload, **fields)
        outcome = await life.reporter.outcome(instance_id)
        found.append((outcome, life.reporter.rows[instance_id].excerpt))

    lab.live(body)
    return found[0]


def shell(interpreter: tuple[str, ...] = ("/bin/bash", "-lc")) -> ShellTask:
    return ShellTask(path="/usr/bin:/bin", lang="C.UTF-8", extra={}, interpreter=interpreter)


def plan(payload: str, *interpreter: str, **fields: Any) -> ProcessPlan:
    task = shell(interpreter or ("/bin/bash", "-lc"))
    return task.plan(Dispatch(instance_id="t", task_type="shell", payload=payload, **fields))


def test_standard_input_is_empty(lab: ExecutorLab) -> None:
    outcome, excerpt = run(lab, "stdin", "wc -c; readlink /proc/self/fd/0; read x; echo $?")
    assert outcome.status is Status.SUCCESS
    assert excerpt == "0\n/dev/null\n1\n"


def test_payload_of_a_megabyte_runs_and_may_read_nothing_of_itself_from_stdin(
    lab: ExecutorLab,
) -> None:
    script = "x=1\n" * 250_000 + "echo $x; shopt -q login_shell && echo login; wc -c; exit 7\n"
    assert len(script) > 1_000_000
    outcome, excerpt = run(lab, "long", script)
    assert (outcome.exit_code, excerpt) == (7, "1\nlogin\n0\n")


def test_payload_at_the_argument_limit_and_one_beyond_run_alike(lab: ExecutorLab) -> None:
    for name, length in (("at", MAX_STRING_BYTES), ("beyond", MAX_STRING_BYTES + 1)):
        script = "echo end #".ljust(length, "x")
        assert run(lab, name, script)[1] == "end\n"


def test_another_interpreter_gets_the_payload_as_its_last_argument(lab: ExecutorLab) -> None:
    python = ("/usr/bin/python3", "-I", "-c")
    program = "import sys; print(6 * 7, sys.stdin.read() == '')"
    assert run(lab, "py", program, python)[1] == "42 True\n"
    long = program + "\n" + "#" * MAX_STRING_BYTES
    assert run(lab, "py-long", long, python)[1] == "42 True\n"


@pytest.mark.parametrize(
    ("interpreter", "expected"),
    [
        (("/bin/bash", "-lc"), ("/bin/bash", "-l")),
        (("/bin/sh", "-c"), ("/bin/sh",)),
        (("/bin/sh", "-e", "-uc"), ("/bin/sh", "-e", "-u")),
        (("/usr/bin/perl", "-e"), ("/usr/bin/perl",)),
    ],
)
def test_long_payload_is_run_as_a_file_of_the_same_interpreter(
    interpreter: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    long = "é" * MAX_STRING_BYTES
    found = plan(long, *interpreter)
    assert found.argv == (*expected, f"./{PAYLOAD_FILE}")
    assert found.files == {PAYLOAD_FILE: long.encode()}
    assert plan("short", *interpreter).argv == (*interpreter, "short")


def test_long_payload_for_an_interpreter_that_reads_no_file_is_refused_with_the_reason() -> None:
    with pytest.raises(RejectedError, match=r"task\.shell\.interpreter ends with '--run'"):
        plan("x" * (MAX_STRING_BYTES + 1), "/usr/bin/tool", "--run")


def test_files_lie_in_the_work_directory_and_are_the_tasks_alone(lab: ExecutorLab) -> None:
    files = {"a b.txt": "one\n", "é": "zwei", ".hidden": "", "-x": "3"}
    script = "LC_ALL=C ls -A | cat; cat 'a b.txt' é ./-x; stat -c ' %a %u' é; id -u; echo >>é"
    outcome, excerpt = run(lab, "files", script, files=files)
    assert outcome.status is Status.SUCCESS
    names, _, rest = excerpt.partition("one\n")
    assert names.split("\n")[:-1] == sorted(files, key=str.encode)
    content, mode, owner, own = rest.split()
    assert (content, mode) == ("zwei3", "600")
    assert owner == own


def test_many_files_and_a_long_payload_go_together(lab: ExecutorLab) -> None:
    files = {f"f{number}": "x" * 10_000 for number in range(FILES_MAX - 1)}
    script = "ls | wc -l; cat f* | wc -c #" + "x" * MAX_STRING_BYTES
    assert run(lab, "many", script, files=files)[1] == f"{FILES_MAX - 1}\n{10_000 * 149}\n"


@pytest.mark.parametrize(
    "files",
    [
        {"": "x"},
        {".": "x"},
        {"..": "x"},
        {"a/b": "x"},
        {"../escape": "x"},
        {"/etc/passwd": "x"},
        {"nul\0": "x"},
        {"x" * 256: "x"},
        {"é" * 128: "x"},
        {PAYLOAD_FILE: "x"},
        {f"f{number}": "" for number in range(FILES_MAX + 1)},
        {"n" * 200 + f"{number}": "" for number in range(100)},
    ],
    ids=range(12),
)
def test_files_that_cannot_be_put_are_an_invalid_request(
    lab: ExecutorLab, files: dict[str, str], request: pytest.FixtureRequest
) -> None:
    outcome, _ = run(lab, request.node.callspec.id + "f", "true", files=files)
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.INVALID_REQUEST)
    assert outcome.reason.startswith("cannot start the task: ")


def test_interpreter_that_is_not_there_fails_its_task(lab: ExecutorLab) -> None:
    outcome, _ = run(lab, "absent", "true", ("/nonexistent/sh", "-c"))
    assert outcome.error_code is ErrorCode.SPAWN_FAILED
    assert "exec" in outcome.reason
