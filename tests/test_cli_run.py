from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import DEADLINE_S, STOCKADE, eventually, make_place, processes_that_name

from stockade.supervisor.limits import LIMIT_FIELDS

ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "SECRET": "token"}


def stockade_run(
    *arguments: str, stdin: bytes | int | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*STOCKADE, "run", *arguments],
        capture_output=True,
        env=ENVIRONMENT,
        timeout=DEADLINE_S,
        check=False,
        **given,
        **options,
    )


def begun_run(*command: str, **options: Any) -> subprocess.Popen[bytes]:
    """A run that goes on, once its script has said that it has begun."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


def outcome_of(ended: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.stderr.splitlines()[-1])
    return found


@pytest.fixture(autouse=True, scope="module")
def temporary_directory() -> Iterator[None]:
    """One of our own: tests beside these use /tmp, too."""
    place = make_place()
    ENVIRONMENT["TMPDIR"] = str(place)
    yield
    place.rmdir()


def leftovers() -> list[Path]:
    return list(Path(ENVIRONMENT["TMPDIR"]).iterdir())


def test_output_and_error_output_stay_apart() -> None:
    ended = stockade_run("--", "sh", "-c", "echo out; echo err >&2")
    assert (ended.returncode, ended.stdout) == (0, b"out\n")
    lines = ended.stderr.splitlines()
    assert lines[-1] == b"err"
    # On a host that cannot enforce everything, one line more says so.
    assert len(lines) <= 2


def test_command_starts_with_the_usual_umask_whatever_the_callers_is() -> None:
    assert stockade_run("--", "sh", "-c", "umask", umask=0o077).stdout == b"0022\n"


@pytest.mark.parametrize(
    ("arguments", "status", "error_code"),
    [
        (["--", "true"], 0, ""),
        (["--", "sh", "-c", "exit 7"], 7, "execute_failed"),
        (["--", "sh", "-c", "exit 137"], 137, "execute_failed"),
        (["--timeout", "300ms", "--", "sleep", "60"], 124, "timeout"),
        (["--runtime-max", "300ms", "--", "sleep", "60"], 124, "timeout"),
        (["--", "sh", "-c", "kill -SEGV $$"], 128 + 11, "signaled"),
        (["--", "sh", "-c", "kill -KILL $$"], 128 + 9, "signaled"),
        (["--", "/nonexistent/program"], 125, "spawn_failed"),
        (["--", "no-such-program"], 125, "spawn_failed"),
        (
            ["--memory-max", "40M", "--", "python3", "-c", "x=b'x'*(200<<20);input()"],
            137,
            "oom_killed",
        ),
    ],
)
def test_exit_status_and_json_tell_how_it_ended(
    arguments: list[str], status: int, error_code: str
) -> None:
    ended = stockade_run("--json", *arguments)
    outcome = outcome_of(ended)
    assert (ended.returncode, outcome["error_code"]) == (status, error_code), ended.stderr
    assert set(outcome) >= {
        "status", "error_code", "exit_code", "signal", "reason", "wall_s", "cpu_s",
        "memory_peak_bytes", "processes_peak", "output_bytes", "output_truncated", "profile",
        "degraded",
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag", "--", "true"],
        ["--memory-max", "lots", "--", "true"],
        ["--timeout", "-1", "--", "true"],
        ["--env", "novalue", "--", "true"],
        ["--profile", "imaginary", "--", "true"],
        ["--config", "/nonexistent.toml", "--", "true"],
        [],
    ],
)
def test_what_stockade_cannot_do_ends_with_125_and_no_traceback(arguments: list[str]) -> None:
    ended = stockade_run(*arguments)
    assert ended.returncode == 125
    assert ended.stderr
    assert b"Traceback" not in ended.stderr


def test_there_is_a_flag_for_every_limit() -> None:
    text = stockade_run("--help").stdout.decode()
    for name in LIMIT_FIELDS:
        assert f"--{name.replace('_', '-')} " in text


def test_environment_is_clean_and_env_adds_to_it() -> None:
    ended = stockade_run("--env", "A=b=c", "--", "env")
    names = {line.partition(b"=")[0].decode() for line in ended.stdout.splitlines()}
    assert names == {
        "PATH", "HOME", "TMPDIR", "PWD", "USER", "LOGNAME", "SHELL", "LANG", "SANDBOX", "A",
    }  # fmt: skip
    assert b"A=b=c\n" in ended.stdout


def test_working_directory_is_fresh_and_gone_afterwards() -> None:
    script = "pwd; ls -A; mkdir -p a/b; chmod 0 a"
    ended = stockade_run("--profile", "process", "--", "sh", "-c", script)
    (directory,) = ended.stdout.decode().split()
    assert not Path(directory).exists()
    assert leftovers() == []


def test_chdir_starts_elsewhere() -> None:
    assert stockade_run("--chdir", "/usr/bin", "--", "pwd").stdout == b"/usr/bin\n"


def test_standard_input_is_passed_on() -> None:
    assert stockade_run("--", "cat", stdin=b"x" * 300_000).stdout == b"x" * 300_000


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_stream_that_is_closed_is_dev_null_and_nothing_of_ours(closed: str) -> None:
    script = "[ $(readlink /proc/self/fd/0) = /dev/null ] && exit 7"
    ended = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "-", *STOCKADE, "run", "--", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=ENVIRONMENT,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (7, b"")


def test_terminal_is_not_passed_on() -> None:
    leader, follower = pty.openpty()
    try:
        ended = subprocess.run(
            [*STOCKADE, "run", "--", "sh", "-c", "[ -t 0 ] && echo terminal; cat; tty"],
            stdin=follower,
            capture_output=True,
            env=ENVIRONMENT,
            timeout=DEADLINE_S,
            check=False,
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert ended.stdout == b"not a tty\n"


@pytest.mark.parametrize(
    ("arguments", "printed_bytes", "passed_bytes"),
    [([], 20 << 20, 20 << 20), (["--output-max", "100K"], 1 << 20, 100 << 10)],
)
def test_output_is_counted_whole_and_passed_on_up_to_an_output_max(
    arguments: list[str], printed_bytes: int, passed_bytes: int
) -> None:
    ended = stockade_run("--json", *arguments, "--", "head", "-c", f"{printed_bytes}", "/dev/zero")
    assert len(ended.stdout) == passed_bytes
    outcome = outcome_of(ended)
    assert outcome["output_bytes"] == printed_bytes
    assert outcome["output_truncated"] == (passed_bytes < printed_bytes)


def test_reader_that_goes_away_ends_the_command() -> None:
    ended = subprocess.run(
        ["bash", "-c", f"{' '.join(STOCKADE)} run -- yes | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        env=ENVIRONMENT,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == (b"y\n", 128 + signal.SIGPIPE)


def test_output_that_cannot_be_passed_on_is_no_success() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*STOCKADE, "run", "--", "echo", "hello"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            timeout=DEADLINE_S,
            check=False,
        )
    assert ended.returncode == 125
    assert b"No space left on device" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_cancels_the_command_and_leaves_nothing(number: signal.Signals) -> None:
    process = begun_run(
        *STOCKADE, "run", "--json", "--", "sh", "-c", "echo begun; sleep 654.5",
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert json.loads(errors.splitlines()[-1])["status"] == "cancelled"
    assert processes_that_name("654.5") == []
    assert leftovers() == []


def test_signal_while_the_sandbox_is_set_up_cancels_and_leaves_nothing() -> None:
    place = make_place()
    process = subprocess.Popen(
        [*STOCKADE, "run", "--json", "--", "sleep", "656.5"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "TMPDIR": str(place)},
    )
    try:
        eventually(lambda: list(place.glob("stockade-run-*")))
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 128 + signal.SIGTERM
        assert json.loads(errors.splitlines()[-1])["status"] == "cancelled"
        assert processes_that_name("656.5") == []
        assert processes_that_name(str(place)) == []
        assert list(place.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        subprocess.run(["rm", "-r", place], check=True)


def test_hangup_that_is_ignored_cancels_nothing() -> None:
    script = "echo begun; read word; exit 7"
    process = begun_run(
        "sh", "-c", 'trap "" HUP; exec "$@"', "-", *STOCKADE, "run", "--", "sh", "-c", script,
        stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    status = Path(f"/proc/{process.pid}/status").read_text()
    (ignored,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    assert int(ignored, 16) & 1 << signal.SIGHUP - 1
    process.send_signal(signal.SIGHUP)
    process.communicate(b"go on\n", timeout=DEADLINE_S)
    assert process.returncode == 7


def test_killed_run_takes_its_command_with_it() -> None:
    process = begun_run(
        *STOCKADE, "run", "--profile", "process", "--", "sh", "-c",
        "echo begun; pwd; sleep 655.5",
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    directory = Path(process.stdout.readline().decode().strip()).parents[1]
    process.kill()
    process.wait()
    process.stdout.close()
    eventually(lambda: not processes_that_name("655.5"))
    eventually(lambda: not processes_that_name(str(directory)))
    subprocess.run(["rm", "-r", directory], check=True)


def test_runs_side_by_side_do_not_meet() -> None:
    processes = [
        subprocess.Popen(
            [*STOCKADE, "run", "--", "sh", "-c", f"sleep 0.2; echo {number}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        for number in range(6)
    ]
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert outputs == [b"%d\n" % number for number in range(6)]


def test_unsupported_limits_are_refused_when_asked_for() -> None:
    ended = stockade_run("--on-unsupported", "refuse", "--workdir-max", "1M", "--", "true")
    assert ended.returncode == 125
    assert b"cannot enforce" in ended.stderr
