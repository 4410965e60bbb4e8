import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stockade.supervisor.cli.config import render
from stockade.supervisor.config import KEYS
from stockade.supervisor.config_load import load

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def stockade(tmp_path):
    """Runs the command as an operator would, with a home and an environment of its own."""

    def run(*arguments, **environ):
        return subprocess.run(
            [sys.executable, "-m", "stockade.supervisor.cli.main", "config", *arguments],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LC_ALL": "C.UTF-8", **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "worker.toml"
        path.write_text(text)
        return path

    return write_file


def test_the_default_configuration_is_accepted(stockade):
    path = ROOT / "deploy" / "stockade.toml"
    done = stockade("check", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}: ok\n", "")


def test_a_bad_file_ends_with_78_and_one_line_a_problem(stockade, write):
    path = write('[worker]\nmax_concurency = 3\nlog_level = "loud"\n')
    done = stockade("check", str(path))
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 2
    assert "did you mean max_concurrency?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_number_that_python_cannot_hold_ends_with_78(stockade, write):
    done = stockade("check", str(write(f"[worker]\nmax_concurrency = {'9' * 5000}\n")))
    assert done.returncode == 78
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_file_ends_with_78(stockade, tmp_path):
    done = stockade("check", str(tmp_path / "missing.toml"))
    assert done.returncode == 78
    assert "No such file" in done.stderr


def test_a_bad_environment_ends_with_78(stockade, write):
    done = stockade("show", "--config", str(write("")), STOCKADE_WORKER_IDD="x")
    assert done.returncode == 78
    assert "did you mean STOCKADE_WORKER_ID?" in done.stderr


def test_warnings_go_to_stderr_and_change_no_status(stockade, write):
    done = stockade("check", str(write("[http]\nheartbeat_interval = 60")))
    assert done.returncode == 0
    assert "warning: http.heartbeat_interval is 1min" in done.stderr


def test_show_tells_every_key_its_value_and_where_it_came_from(stockade, write):
    path = write('[worker]\nid = "w1"\n[limits.max]\nmemory_max = "1G"\n')
    done = stockade("show", "--config", str(path), STOCKADE_LIMITS_MEMORY_MAX="64M")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len([line for line in lines if " = " in line]) == len(KEYS)
    for value, source in [
        ('id = "w1"', f"file {path}"),
        ('memory_max = "64M"', "environment STOCKADE_LIMITS_MEMORY_MAX"),
        ('memory_max = "1G"', f"file {path}"),
        ('runtime_max = "5min"', "default"),
    ]:
        assert any(
            re.fullmatch(rf"{re.escape(value)} +# {re.escape(source)}", line) for line in lines
        )


def test_show_names_an_alias_as_the_source(stockade, write):
    path = write("")
    done = stockade("show", "--config", str(path), SCHEDULER_URL="http://127.0.0.1:8080")
    assert done.returncode == 0
    assert re.search(
        r'scheduler = "http://127.0.0.1:8080" +# environment SCHEDULER_URL', done.stdout
    )


def test_what_show_prints_is_a_configuration_that_says_the_same(stockade, write, tmp_path):
    path = write(
        '[worker]\nlabels = { "a b" = "\\"x\\" \\u00e9 #" }\n[limits]\nruntime_max = "2s"\n'
        'cpu_quota = "7%"\n[http]\nallow_networks = ["10.0.0.0/8"]\nlisten = "[::]:1"\n'
    )
    shown = tmp_path / "shown.toml"
    shown.write_text(stockade("show", "--config", str(path)).stdout)
    environ = {"HOME": str(tmp_path)}
    assert load(shown, environ).config == load(path, environ).config


def test_show_prints_no_secret(stockade, write, tmp_path):
    token = tmp_path / "token"
    token.write_text("geheim-token")
    path = write(
        f'[http]\ntoken_file = "{token}"\n'
        '[task.shell]\nenvironment = { DATABASE_PASSWORD = "geheim-file" }\n'
    )
    done = stockade("show", "--config", str(path))
    assert done.returncode == 0
    assert "DATABASE_PASSWORD" in done.stdout
    assert "geheim" not in done.stdout + done.stderr
    empty = str(write(""))
    done = stockade("show", "--config", empty, STOCKADE_TASK_SHELL_ENVIRONMENT="A=geheim")
    assert '{ "A" = "(hidden)" }' in done.stdout
    assert "geheim" not in done.stdout + done.stderr
    done = stockade("show", "--config", empty, SCHEDULER_URL="http://user:geheim@127.0.0.1:8080")
    assert done.returncode == 78
    assert "geheim" not in done.stdout + done.stderr


def test_a_file_name_cannot_break_out_of_its_comment(tmp_path):
    path = tmp_path / 'x\nid = "evil"'
    path.write_text('[worker]\nid = "w1"\n')
    assert tomllib.loads(render(load(path, {})))["worker"]["id"] == "w1"
