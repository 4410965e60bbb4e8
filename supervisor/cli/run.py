"""``stockade run``: one command in a sandbox, no worker needed."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.sandbox import capabilities
from stockade.sandbox.errors import UnsupportedError
from stockade.sandbox.limits import Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import PROFILES, Profile, View
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.cli.sandboxed import ended_by_signal, run_sandboxed
from stockade.supervisor.limits import LIMIT_FIELDS, UNLIMITED, effective, parse_seconds
from stockade.supervisor.process_plan import ProcessPlan
from stockade.supervisor.task_types.shell import shell_environment

EXIT_TIMEOUT: Final = 124
EXIT_FAILED: Final = 125
EXIT_OUT_OF_MEMORY: Final = 137
EXIT_SIGNAL: Final = 128

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_LANG: Final = "C.UTF-8"

# The fields of --json, in the order of the documentation; a report's extra fields are the same.
JSON_FIELDS: Final = (
    "status", "error_code", "exit_code", "signal", "reason", "wall_s", "cpu_s", "cpu_user_s",
    "cpu_system_s", "cpu_throttled_s", "memory_peak_bytes", "memory_peak_source",
    "processes_peak", "io_read_bytes", "io_write_bytes", "stall_cpu_s", "stall_memory_s",
    "stall_io_s", "output_bytes", "output_truncated", "profile", "degraded",
)  # fmt: skip

# An outcome that is not the command's own doing is told on stderr.
_OURS: Final = frozenset(ErrorCode) - {ErrorCode.NONE, ErrorCode.EXECUTE_FAILED}


_Paths = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="As in [profile]; repeatable.", show_default=False),
]


def _run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    *,
    profile: Annotated[
        str, typer.Option(help=f"How strongly to confine: {', '.join(PROFILES)}.")
    ] = Profile.PRIVATE.value,
    timeout: Annotated[
        str | None, typer.Option(help="Longest run, as 5s or 2min.", show_default=False)
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K=V", help="A variable of the command; repeatable.", show_default=False
        ),
    ] = None,
    chdir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Working directory [default: a fresh one].", show_default=False
        ),
    ] = None,
    read_only_paths: _Paths = None,
    read_write_paths: _Paths = None,
    inaccessible_paths: _Paths = None,
    private_network: Annotated[
        bool, typer.Option("--private-network", help="No network but loopback, in private too.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Take defaults and maximum of limits from FILE.", show_default=False),
    ] = None,
    on_unsupported: Annotated[
        str, typer.Option(help="What to do when this host cannot enforce all: degrade or refuse.")
    ] = "degrade",
    as_json: Annotated[
        bool, typer.Option("--json", help="The outcome as JSON on stderr's last line.")
    ] = False,
    show_plan: Annotated[
        bool, typer.Option("--plan", help="Print what would be done, step by step; run nothing.")
    ] = False,
    **limits: str | None,
) -> None:
    """Run one command in a sandbox; its output streams through.

    The exit status is the command's own, 124 on timeout, 137 when killed for memory, 128+N on
    signal N, 130 on Ctrl-C, 125 when Stockade itself failed.
    """
    base, maximum, path, lang = _defaults(config)
    in_force, notes = effective(base, maximum, limits, _seconds(timeout))
    plan = ProcessPlan(
        argv=tuple(command),
        environment={**shell_environment(path=path, lang=lang), **_variables(env or [])},
        directory=None if chdir is None else os.path.abspath(chdir),
    )
    confined = _profile(profile)
    view = View(
        read_only_paths=_absolute(read_only_paths),
        read_write_paths=_absolute(read_write_paths),
        inaccessible_paths=_absolute(inaccessible_paths),
        private_network=private_network,
    )
    host = capabilities.probe(tempfile.gettempdir())
    missing = capabilities.missing(confined, in_force, host, view)
    for note in notes:
        print(f"stockade: {note}", file=sys.stderr)
    if show_plan:
        from stockade.supervisor.cli.run_plan import print_plan

        first = _find_program(command[0], plan.environment["PATH"]) or command[0]
        plan = ProcessPlan((first, *command[1:]), plan.environment, {}, plan.directory)
        print_plan(plan, in_force, confined, view, host, as_json=as_json)
        return
    if missing and on_unsupported != "degrade":
        raise UnsupportedError(missing[0].feature, f"{missing[0].why}; {missing[0].mend}")
    if missing:
        features = ", ".join(entry.feature for entry in missing)
        print(f"stockade: not fully enforced on this host: {features}", file=sys.stderr)
    program = _find_program(command[0], plan.environment["PATH"])
    if program is None:
        outcome = Outcome(
            Status.FAILED,
            ErrorCode.SPAWN_FAILED,
            reason=f"cannot start the task: {command[0]}: not found in PATH",
            profile=profile,
            degraded=tuple(entry.feature for entry in missing),
        )
    else:
        cut = in_force.output_max if limits["output_max"] is not None else None
        plan = ProcessPlan((program, *command[1:]), plan.environment, {}, plan.directory)
        outcome = run_sandboxed(plan, in_force, confined, view, output_max=cut)
    _tell(outcome, as_json=as_json)
    raise CommandEnded(exit_status(outcome))


def exit_status(outcome: Outcome) -> int:
    """The status that ``stockade run`` ends with."""
    if outcome.status is Status.SUCCESS:
        return 0
    if outcome.status is Status.TIMEOUT:
        return EXIT_TIMEOUT
    if outcome.status is Status.CANCELLED:
        # Who asked for it was the signal that we got.
        return EXIT_SIGNAL + ended_by_signal(outcome)
    if outcome.error_code is ErrorCode.OOM_KILLED:
        return EXIT_OUT_OF_MEMORY
    if outcome.error_code is ErrorCode.EXECUTE_FAILED and outcome.exit_code:
        return outcome.exit_code
    if outcome.error_code is ErrorCode.SIGNALED and outcome.signal:
        return EXIT_SIGNAL + _signal_number(outcome.signal)
    return EXIT_FAILED


def _defaults(config: Path | None) -> tuple[Limits, Limits, str, str]:
    if config is None:
        return Limits(), UNLIMITED, DEFAULT_PATH, DEFAULT_LANG
    from stockade.supervisor.cli.worker import load_config

    loaded = load_config(config, {}).config
    return loaded.limits, loaded.limits_max, loaded.task_shell.path, loaded.task_shell.lang


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise StockadeError(f"cannot use --timeout: {error}") from error


def _variables(assignments: list[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise StockadeError(f"cannot use --env {assignment!r}: write NAME=VALUE")
        variables[name] = value
    return variables


def _profile(name: str) -> Profile:
    try:
        return Profile(name)
    except ValueError:
        raise StockadeError(
            f"cannot use --profile {name!r}: there are {', '.join(PROFILES)}"
        ) from None


def _absolute(paths: list[str] | None) -> tuple[str, ...]:
    found = tuple(os.path.abspath(path) for path in paths or ())
    for path in found:
        if path == "/" or not os.path.exists(path):
            reason = "name what is meant in it" if path == "/" else "there is no such path"
            raise StockadeError(f"cannot use the path {path}: {reason}")
    return found


def _find_program(name: str, path: str) -> str | None:
    """The launcher executes a path as it is given; looking a name up is the caller's."""
    return name if "/" in name else shutil.which(name, path=path)


def _signal_number(name: str) -> int:
    import signal

    return int(name[3:]) if name[3:].isdigit() else signal.Signals[name].value


def _tell(outcome: Outcome, *, as_json: bool) -> None:
    if outcome.error_code in _OURS and outcome.reason:
        print(f"stockade: {outcome.reason}", file=sys.stderr)
    if as_json:
        fields = outcome.to_json()
        print(json.dumps({name: fields[name] for name in JSON_FIELDS}), file=sys.stderr)


def _with_limit_flags(function: Any) -> Any:
    """The command with a flag for each limit of the table, in place of ``**limits``."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for name, field in LIMIT_FIELDS.items():
        option = typer.Option(
            f"--{name.replace('_', '-')}", help=field.metadata["help"], show_default=False
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, option],
            )
        )
    function.__signature__ = signature.replace(parameters=parameters)
    function.__annotations__ = {
        **{parameter.name: parameter.annotation for parameter in parameters},
        "return": None,
    }
    return function


run = _with_limit_flags(_run)
