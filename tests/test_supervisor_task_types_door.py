"""Task types of other packages: real entry points, a real executor, and every fault contained."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from executor_lab import ExecutorLab, Life
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S, WorkerProcess

from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.supervisor.task_types.base import Dispatch, LoopPlan, ProcessPlan, TaskType, invalid
from stockade.supervisor.task_types.built_in import NAMES
from stockade.supervisor.task_types.door import GROUP, close_types, load_classes, make_types

NUMBERS = itertools.count()
EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "example-task-type"


class Good(TaskType):
    name = "good"

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        async def run(write: Any) -> Outcome:
            write(b"out")
            return Outcome(Status.SUCCESS)

        return LoopPlan(run)


class TakenName(Good):
    name = "shell"


class UpperCase(Good):
    name = "Upper"


class Nameless(TaskType):
    def plan(self, dispatch: Dispatch) -> LoopPlan:
        raise AssertionError


class Abstract(TaskType):
    name = "abstract"


class NeedsArguments(Good):
    name = "needs-arguments"

    def __init__(self, more: int) -> None:
        raise AssertionError


NOT_A_CLASS = Good()


def offered(**values: str) -> list[EntryPoint]:
    return [EntryPoint(name, f"{__name__}:{value}", GROUP) for name, value in values.items()]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module by its name, as entry points find it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Absent", "AttributeError"),
        ("NOT_A_CLASS", "is not a class derived from TaskType"),
        ("Path", "is not a class derived from TaskType"),
        ("TakenName", "the name 'shell' is taken"),
        ("UpperCase", "not lower-case"),
        ("Nameless", "its name is None"),
        ("Abstract", "lacks plan"),
    ],
)
def test_class_that_cannot_be_used_costs_its_own_type_only(value: str, expected: str) -> None:
    door = load_classes(NAMES, offered(bad=value, good="Good"))
    types, faults = make_types(door)
    assert list(types) == ["good"]
    assert expected in faults["bad"]


def test_module_that_cannot_be_imported_costs_its_own_type_only(tmp_path: Path) -> None:
    for name, code in {"stops": "raise SystemExit(3)", "breaks": "1/0", "syntax": "def"}.items():
        (tmp_path / f"stockade_test_{name}.py").write_text(code)
    sys.path.insert(0, str(tmp_path))
    try:
        bad = [
            EntryPoint(name, f"stockade_test_{name}:X", GROUP)
            for name in ("stops", "breaks", "syntax", "absent")
        ]
        door = load_classes(NAMES, [*bad, *offered(good="Good")])
    finally:
        sys.path.remove(str(tmp_path))
    assert list(door.classes) == ["good"]
    assert "SystemExit: 3" in door.faults["stops"]
    assert "ZeroDivisionError" in door.faults["breaks"]
    assert "SyntaxError" in door.faults["syntax"]
    assert "ModuleNotFoundError" in door.faults["absent"]


def test_second_class_of_a_name_is_left_out() -> None:
    door = load_classes(NAMES, offered(a="Good", b="Good"))
    assert list(door.classes) == ["good"]
    assert "taken" in door.faults["b"]


def test_class_that_cannot_be_made_is_unsupported_with_the_reason() -> None:
    types, faults = make_types(load_classes(NAMES, offered(x="NeedsArguments")))
    assert types == {}
    assert "cannot make NeedsArguments: TypeError" in faults["needs-arguments"]


def test_fault_in_close_holds_up_no_other() -> None:
    closed = []

    class Breaks(Good):
        async def close(self) -> None:
            raise OSError("no")

    class Closes(Good):
        async def close(self) -> None:
            closed.append(self)

    asyncio.run(close_types({"a": Breaks(), "b": Closes()}))
    assert len(closed) == 1


# In a real executor


@pytest.fixture
def lab() -> Iterator[ExecutorLab]:
    executor_lab = ExecutorLab()
    yield executor_lab
    executor_lab.close()


def run_type(lab: ExecutorLab, made: TaskType, **fields: Any) -> Outcome:
    """How one task of this type ends; after it a shell task must still run."""
    outcomes: list[Outcome] = []

    async def body(life: Life) -> None:
        life.types[made.name] = made
        number = next(NUMBERS)
        await life.dispatch(f"t{number}", "payload", task_type=made.name, **fields)
        outcomes.append(await life.reporter.outcome(f"t{number}"))
        await life.dispatch(f"after{number}", "true")
        assert (await life.reporter.outcome(f"after{number}")).status is Status.SUCCESS

    lab.live(body)
    return outcomes[0]


class Runs(TaskType):
    """Runs a coroutine function of a test."""

    name = "runs"

    def __init__(self, run: Any) -> None:
        self._run = run

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        return LoopPlan(self._run)


def test_fault_in_validate_and_plan_is_the_types_own(lab: ExecutorLab) -> None:
    class Validates(Good):
        def validate(self, dispatch: Dispatch) -> None:
            raise KeyError("x")

    outcome = run_type(lab, Validates())
    assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.SPAWN_FAILED)
    assert outcome.reason.startswith("fault in task type good: KeyError")


class Breaks(Good):
    """Its plan is a fault."""

    def plan(self, dispatch: Dispatch) -> LoopPlan:
        raise KeyError("x")


def test_fault_in_plan_holds_up_nobody_where_promises_are_counted(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("t", "payload", task_type="good")
        assert (await life.reporter.outcome("t")).error_code is ErrorCode.SPAWN_FAILED
        await life.dispatch("after", "true")
        assert (await life.reporter.outcome("after")).status is Status.SUCCESS

    lab.live(body, types=[Breaks()], memory_max="1G")


def test_fault_in_plan_holds_up_nobody_while_a_reload_waits(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        await life.dispatch("first", "sleep 300")
        await life.dispatch("t", "payload", task_type="good")
        await life.dispatch("after", "true")
        await life.executor.let_loop_tasks_end(10.0)
        await life.intake.cancel("first")
        assert (await life.reporter.outcome("first")).status is Status.CANCELLED
        assert (await life.reporter.outcome("t")).error_code is ErrorCode.SPAWN_FAILED
        assert (await life.reporter.outcome("after")).status is Status.SUCCESS

    lab.live(body, types=[Breaks()], max_concurrency=1)


def test_task_that_lives_is_adopted_although_its_type_is_at_fault_now(
    lab: ExecutorLab, place: Path
) -> None:
    place.chmod(0o777)

    class Waits(Good):
        def plan(self, dispatch: Dispatch) -> Any:
            script = f"until [ -e {place}/go ]; do sleep 0.05; done; echo gone"
            return ProcessPlan(("/bin/sh", "-c", script), {"PATH": "/usr/bin:/bin"})

    async def crash(life: Life) -> None:
        await life.dispatch("t", "payload", task_type="good")
        await life.reporter.until(lambda: "running" in life.reporter.told["t"])

    async def recover(life: Life) -> None:
        (place / "go").touch()
        assert (await life.reporter.outcome("t")).status is Status.SUCCESS
        assert life.reporter.rows["t"].excerpt == "gone\n"

    lab.live(crash, types=[Waits()])
    lab.live(recover, types=[Breaks()])


def test_validate_refuses_as_invalid_request(lab: ExecutorLab) -> None:
    class Validates(Good):
        def validate(self, dispatch: Dispatch) -> None:
            raise invalid("the payload is not a poem; write one")

    outcome = run_type(lab, Validates())
    assert (outcome.error_code, outcome.reason) == (
        ErrorCode.INVALID_REQUEST,
        "the payload is not a poem; write one",
    )


@pytest.mark.parametrize(
    "plan",
    [
        None,
        "echo hi",
        ProcessPlan(argv=(), environment={}),
        ProcessPlan(argv=("/bin/true", 1), environment={}),  # type: ignore[arg-type]
        ProcessPlan(argv=("/bin/true",), environment={"A": "\0"}),
        ProcessPlan(argv=("/bin/true",), environment={"A=B": "x", "": "y"}),
        ProcessPlan(argv=("/bin/true",), environment={}, files={"../x": b""}),
        ProcessPlan(argv=("/bin/true",), environment={}, files={"x": "text"}),  # type: ignore[dict-item]
        ProcessPlan(argv=("/bin/true",), environment={}, directory="relative"),
        ProcessPlan(argv=("/bin/true",), environment={}, files={str(i): b"" for i in range(300)}),
        LoopPlan(None),  # type: ignore[arg-type]
    ],
)
def test_wrong_plan_fails_its_task_alone(lab: ExecutorLab, plan: Any) -> None:
    class Plans(Good):
        def plan(self, dispatch: Dispatch) -> Any:
            return plan

    outcome = run_type(lab, Plans())
    assert outcome.status is Status.FAILED
    assert outcome.reason


def test_exceptions_of_a_run_are_contained_even_those_that_end_a_process(lab: ExecutorLab) -> None:
    for error in (ValueError("x"), SystemExit(0), KeyboardInterrupt(), MemoryError()):

        async def run(write: Any, error: BaseException = error) -> Outcome:
            raise error

        outcome = run_type(lab, Runs(run))
        assert (outcome.status, outcome.error_code) == (Status.FAILED, ErrorCode.EXECUTE_FAILED)
        assert outcome.reason.startswith("fault in task type runs: ")


def test_run_that_gives_no_outcome_is_at_fault(lab: ExecutorLab) -> None:
    async def run(write: Any) -> Any:
        return "done"

    outcome = run_type(lab, Runs(run))
    assert "run() gave str, not an Outcome" in outcome.reason


def test_run_that_prints_text_is_at_fault(lab: ExecutorLab) -> None:
    async def run(write: Any) -> Outcome:
        write("text")
        return Outcome(Status.SUCCESS)

    assert "str is not bytes" in run_type(lab, Runs(run)).reason


def test_run_that_cancels_itself_is_at_fault(lab: ExecutorLab) -> None:
    async def run(write: Any) -> Outcome:
        raise asyncio.CancelledError

    outcome = run_type(lab, Runs(run))
    assert outcome.error_code is ErrorCode.EXECUTE_FAILED


def test_run_that_ignores_its_deadline_is_left_behind(lab: ExecutorLab) -> None:
    wrote: list[str] = []

    async def run(write: Any) -> Outcome:
        while True:
            try:
                await asyncio.sleep(0.01)
                write(b"x")
            except asyncio.CancelledError:
                continue
            except RuntimeError as error:
                wrote.append(str(error))
                await asyncio.sleep(60)

    outcome = run_type(lab, Runs(run), limits={"runtime_max": "200ms", "timeout_stop": "100ms"})
    assert (outcome.status, outcome.error_code) == (Status.TIMEOUT, ErrorCode.TIMEOUT)
    assert "did not stop when asked" in outcome.reason
    assert wrote == ["cannot write output: the task is over"]


def test_run_that_ignores_its_cancel_is_left_behind(lab: ExecutorLab) -> None:
    outcomes = []

    async def body(life: Life) -> None:
        async def run(write: Any) -> Outcome:
            write(b"started")
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)
            return Outcome(Status.SUCCESS)

        life.types["runs"] = Runs(run)
        await life.dispatch("t", "", task_type="runs", limits={"timeout_stop": "100ms"})
        await life.reporter.until(lambda: "running" in life.reporter.told.get("t", ()))
        await life.intake.cancel("t")
        outcomes.append(await life.reporter.outcome("t"))

    lab.live(body)
    assert outcomes[0].status is Status.CANCELLED
    assert "did not stop when asked" in outcomes[0].reason


def test_cancel_at_the_very_start_of_a_run_ends_it(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        ran: list[str] = []

        async def run(write: Any) -> Outcome:
            ran.append("ran")
            await asyncio.sleep(60)
            return Outcome(Status.SUCCESS)

        life.types["runs"] = Runs(run)
        told = life.reporter.running

        def cancel_at_once(row: Any) -> None:
            told(row)
            # In the turn of the loop in which the coroutine was made: it has not begun.
            (task,) = life.executor.find("t")
            asyncio.get_running_loop().call_soon(life.executor.cancel, task, "cancelled")

        life.reporter.running = cancel_at_once  # type: ignore[method-assign]
        await life.dispatch("t", "", task_type="runs")
        assert (await life.reporter.outcome("t")).status is Status.CANCELLED
        assert ran == []

    lab.live(body)


def test_unknown_type_is_accepted_and_reported_failed_at_once(lab: ExecutorLab) -> None:
    async def body(life: Life) -> None:
        for name in ("perl", "", "../shell", "x" * 10_000):
            await life.dispatch(name[:20] or "-", "x", task_type=name)
            outcome = await life.reporter.outcome(name[:20] or "-")
            assert (outcome.status, outcome.error_code) == (
                Status.FAILED,
                ErrorCode.UNSUPPORTED_TASK_TYPE,
            )
            assert "this worker has" in outcome.reason
            assert len(outcome.reason) < 500

    lab.live(body)


# The example in docs/, installed by pip into a place of its own, in a real worker


@pytest.fixture(scope="module")
def example_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source)
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation",
         "--disable-pip-version-check", "--target", str(site), str(source)],
        check=True, capture_output=True, timeout=110,
    )  # fmt: skip
    return site


def test_example_package_of_the_documentation_works_in_a_worker(
    example_site: Path, scheduler: RecordingScheduler
) -> None:
    # As if it were installed beside Stockade, without touching the environment of other tests.
    worker = WorkerProcess(scheduler.url, environment={"PYTHONPATH": str(example_site)})
    tasks = {
        "p": ("python", "import os; print(sorted(os.listdir()), os.environ['SHARD_NO'])"),
        "bad": ("python", "print("),
        "c": ("countdown", "1"),
        "soon": ("countdown", "tomorrow"),
    }
    reports = {}
    try:
        worker.start()
        for instance_id, (task_type, payload) in tasks.items():
            scheduler.dispatch(
                worker.url, schedule_instance_id=instance_id, task_type=task_type, payload=payload
            )
        for instance_id in tasks:
            reports[instance_id] = scheduler.terminal_report(instance_id, DEADLINE_S)
    finally:
        worker.close()
    assert reports["p"]["error_message"] == "['program.py'] 0\n"
    assert reports["bad"]["error_code"] == "invalid_request"
    assert reports["bad"]["reason"].startswith("the payload is not Python")
    assert (reports["c"]["status"], reports["c"]["error_message"]) == ("success", "1\n")
    assert reports["soon"]["error_code"] == "invalid_request"


def test_worker_stops_although_a_types_code_does_not(
    tmp_path: Path, scheduler: RecordingScheduler
) -> None:
    info = tmp_path / "deaf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deaf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ndeaf = stockade_deaf:Deaf\n")
    (tmp_path / "stockade_deaf.py").write_text(DEAF)
    worker = WorkerProcess(scheduler.url, environment={"PYTHONPATH": str(tmp_path)})
    try:
        worker.start()
        scheduler.dispatch(
            worker.url, schedule_instance_id="t", task_type="deaf", payload="",
            limits={"runtime_max": "200ms", "timeout_stop": "100ms"},
        )  # fmt: skip
        assert scheduler.terminal_report("t", DEADLINE_S)["status"] == "timeout"
        assert worker.stop() == 0
    finally:
        worker.close()


DEAF = """
import asyncio
from stockade.supervisor.task_types.base import LoopPlan, TaskType

class Deaf(TaskType):
    name = "deaf"

    def plan(self, dispatch):
        async def run(write):
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        return LoopPlan(run)
"""


def test_type_that_cannot_be_loaded_is_reported_with_the_reason(
    tmp_path: Path, scheduler: RecordingScheduler
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nbroken = stockade_broken:X\n")
    (tmp_path / "stockade_broken.py").write_text("raise SystemExit('stop the worker')")
    worker = WorkerProcess(scheduler.url, environment={"PYTHONPATH": str(tmp_path)})
    try:
        worker.start()
        scheduler.dispatch(worker.url, schedule_instance_id="t", task_type="broken", payload="")
        report = scheduler.terminal_report("t", DEADLINE_S)
    finally:
        worker.close()
    assert report["error_code"] == "unsupported_task_type"
    assert "cannot load stockade_broken:X: SystemExit: stop the worker" in report["reason"]
