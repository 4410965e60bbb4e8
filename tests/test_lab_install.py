"""deploy/install.sh on a host with systemd: what an operator gets without a package.

The tests are steps of one story, in order, and each takes the host as the one before left it. The
dependencies come from tests/install_lab, next to the checkout.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_host import (
    CONFIG,
    PATIENCE_S,
    UNIT,
    Host,
    begin,
    beside,
    command,
    files,
    fresh_host,
    main_pid,
    scope,
)
from spawner_client import lives
from worker_process import eventually, processes_that_name

from stockade.platform import proc

CHECKOUT = Path(__file__).parents[1]
# /opt/stockade is what runs these tests.
PREFIX = "/opt/installed/stockade"
WHEELS, pytestmark = beside("stockade-wheels", "tests/install_lab")


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    Path(PREFIX).parent.mkdir()
    with fresh_host() as found:
        yield found


def install(*arguments: str, status: int = 0, **environment: str) -> str:
    """Runs install.sh as root does; what it printed."""
    ended = subprocess.run(
        [str(CHECKOUT / "deploy/install.sh"), *arguments],
        capture_output=True, text=True, check=False, timeout=4 * PATIENCE_S,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "PYTHON": "/usr/bin/python3",
            "PREFIX": PREFIX,
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(WHEELS), **environment,
        },
    )  # fmt: skip
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_a_host_with_dpkg_is_sent_to_the_package(host: Host) -> None:
    assert "build a package with deploy/build-deb" in install(status=1)
    assert files() == host.before


def test_a_prefix_that_could_be_somebody_elses_is_refused(host: Host) -> None:
    assert "must be absolute and end with /stockade" in install("--remove", status=1, PREFIX="/usr")


def test_what_cannot_be_built_leaves_nothing(host: Host) -> None:
    assert "Could not find a version" in install(status=1, STOCKADE_FORCE="1", PIP_FIND_LINKS="")
    assert files() == host.before


@pytest.mark.timeout(1500)
def test_install_enables_and_starts_nothing(host: Host) -> None:
    assert "systemctl enable --now stockade" in install(STOCKADE_FORCE="1")
    assert command("systemctl", "is-enabled", UNIT, status=1).strip() == "disabled"
    assert command("systemctl", "is-active", UNIT, status=3).strip() == "inactive"
    assert not processes_that_name("stockade.sandbox")
    assert command("stat", "-c", "%U:%G %a", str(CONFIG)).strip() == "root:stockade 640"
    assert Path("/usr/local/share/man/man1/stockade-run.1.gz").exists()
    assert command("systemd-analyze", "verify", "--man=no", UNIT) == ""
    assert command("/usr/local/bin/stockade", "--version").startswith("stockade ")
    # Nothing of what it was made in.
    assert os.listdir(os.path.dirname(PREFIX)) == ["stockade"]


def test_the_worker_runs_tasks(host: Host) -> None:
    begin(host)
    host.run("first", "id -u; echo done")
    assert host.report("first")["status"] == "success"


@pytest.mark.timeout(1500)
def test_installing_again_reloads_and_no_task_notices(host: Host) -> None:
    task = host.sleeper("upgraded", "73001")
    before = main_pid()
    text = CONFIG.read_text()
    install(STOCKADE_FORCE="1")
    assert main_pid() == before
    assert lives("73001") == [task]
    assert CONFIG.read_text() == text
    assert "was renewed and still finishes" in command("/usr/local/bin/stockade", "ps")
    host.run("after", "true")
    assert host.report("after")["status"] == "success"
    assert host.finish("upgraded", task)["signal"] == "SIGTERM"


def test_remove_drains_and_keeps_the_configuration(host: Host) -> None:
    CONFIG.write_text(
        CONFIG.read_text().replace('#drain_timeout = "5min"', 'drain_timeout = "5s"', 1)
    )
    command("systemctl", "restart", UNIT)
    task = host.sleeper("removed", "73002")
    install("--remove")
    assert host.report("removed")["status"] == "cancelled"
    assert proc.process(task) is None
    assert host.scheduler.url in CONFIG.read_text()
    assert not Path("/usr/local/bin/stockade").exists()
    eventually(lambda: scope() == "", PATIENCE_S)
    assert not processes_that_name("stockade.sandbox")


def test_purge_leaves_nothing(host: Host) -> None:
    install("--purge")
    assert files() == host.before
    assert "stockade" not in Path("/etc/passwd").read_text()
    assert "stockade" not in Path("/etc/group").read_text()
