"""The Debian package on a host with systemd: what an operator gets, from install to purge.

The tests are steps of one story, in order, and each takes the host as the one before left it. The
packages come from tests/package_lab, next to the checkout.
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_host import (
    CONFIG,
    PATIENCE_S,
    UNIT,
    URL,
    Host,
    begin,
    beside,
    command,
    files,
    fresh_host,
    main_pid,
    scope,
    show,
    started_anew,
)
from recording_scheduler import RecordingScheduler
from spawner_client import lives
from worker_process import eventually, processes_that_name

from stockade.platform import cgroup, proc

PACKAGES, pytestmark = beside("stockade-packages", "tests/package_lab")


def package(*, is_next: bool) -> str:
    (found,) = (path for path in PACKAGES.glob("*.deb") if ("+next" in path.name) == is_next)
    return str(found)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with fresh_host() as found:
        yield found


def test_install_enables_and_starts_nothing(host: Host) -> None:
    command("apt-get", "install", "-y", package(is_next=False))
    assert command("systemctl", "is-enabled", UNIT, status=1).strip() == "disabled"
    assert command("systemctl", "is-active", UNIT, status=3).strip() == "inactive"
    assert not processes_that_name("stockade.sandbox")
    assert command("stat", "-c", "%U:%G %a", str(CONFIG)).strip() == "root:stockade 640"
    assert command("stat", "-c", "%U:%G %a", "/var/lib/stockade").strip() == "root:root 711"
    assert Path("/usr/share/man/man1/stockade-run.1.gz").exists()
    assert "stockade" in Path("/usr/share/bash-completion/completions/stockade").read_text()
    # Its man pages are for people, and a host need not have the program that shows them.
    assert command("systemd-analyze", "verify", "--man=no", UNIT) == ""


def test_two_lines_and_one_command_make_a_worker_that_runs(host: Host) -> None:
    begin(host)


def test_a_task_of_each_profile_runs(host: Host) -> None:
    private = CONFIG.read_text()
    # What the configuration says is the least that a task gets.
    process = private.replace('#name = "private"', 'name = "process"', 1)
    assert process != private
    for text, profile in ((private, "private"), (private, "sealed"), (process, "process")):
        if CONFIG.read_text() != text:
            CONFIG.write_text(text)
            command("systemctl", "restart", UNIT)
        host.run(f"profile-{profile}", "id -u; echo done", profile=profile)
        report = host.report(f"profile-{profile}")
        assert (report["status"], report["profile"], report["degraded"]) == ("success", profile, [])
    CONFIG.write_text(private)
    command("systemctl", "restart", UNIT)


def test_memory_hog_and_endless_loop_are_contained(host: Host) -> None:
    host.run(
        "hog", "exec python3 -c 'x = bytearray(1 << 30); print(len(x))'",
        limits={"memory_max": "64M"}, timeout_seconds=250,
    )  # fmt: skip
    host.run("loop", "while :; do :; done", timeout_seconds=5)
    assert host.report("hog")["error_code"] == "oom_killed"
    assert host.report("loop")["status"] == "timeout"
    assert show("ActiveState") == "active"


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_supervisor_is_hardened_and_spawner_and_task_have_what_is_theirs(host: Host) -> None:
    task = host.sleeper("status", "72001")
    supervisor = status_of(main_pid())
    (spawner_pid, *_) = (
        pid
        for pid in processes_that_name("stockade.sandbox.spawner_main")
        if "--standby-for" not in Path(f"/proc/{pid}/cmdline").read_text()
    )
    spawner, inside = status_of(spawner_pid), status_of(task)
    user = command("id", "-u", "stockade").strip()
    assert supervisor["Uid"].split() == [user] * 4
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(supervisor[name], 16) == 0, name
        assert int(inside[name], 16) == 0, name
    assert (supervisor["NoNewPrivs"], supervisor["Seccomp"]) == ("1", "2")
    # What would be inherited by tasks that must be able to do more than the supervisor.
    assert (spawner["NoNewPrivs"], spawner["Seccomp"]) == ("0", "0")
    assert spawner["Uid"].split() == ["0"] * 4
    assert 0 < int(spawner["CapEff"], 16) < int(status_of(1)["CapEff"], 16)
    assert int(spawner["CapEff"], 16) == int(spawner["CapBnd"], 16)
    assert inside["NoNewPrivs"] == "1"
    assert inside["Uid"].split()[0] not in ("0", user)
    assert Path(f"/proc/{task}/oom_score_adj").read_text().strip() == "0"
    assert Path(f"/proc/{main_pid()}/oom_score_adj").read_text().strip() == "-900"
    assert cgroup.group_of(main_pid()) == f"/system.slice/{UNIT}"
    host.finish("status", task)


def test_task_lives_through_kill_9_of_the_main_process_and_is_reported(host: Host) -> None:
    task = host.sleeper("killed-main", "72002")
    before = main_pid()
    os.kill(before, signal.SIGKILL)
    started_anew(before)
    assert lives("72002") == [task]
    assert host.finish("killed-main", task)["signal"] == "SIGTERM"


def test_task_lives_through_a_restart(host: Host) -> None:
    task = host.sleeper("restarted", "72003")
    before = main_pid()
    command("systemctl", "restart", UNIT)
    assert started_anew(before) != before
    assert lives("72003") == [task]
    assert host.finish("restarted", task)["signal"] == "SIGTERM"


class Load(threading.Thread):
    """Sends short tasks until it is ended; ``refused`` are those that were not taken."""

    def __init__(self, host: Host, name: str) -> None:
        super().__init__()
        self.host, self.prefix = host, name
        self.sent: list[str] = []
        self.refused: list[str] = []
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.3):
            instance_id = f"{self.prefix}-{len(self.sent)}"
            try:
                self.host.run(instance_id, "true")
            except (AssertionError, urllib.error.URLError, OSError) as error:
                self.refused.append(f"{instance_id}: {error!r}")
            self.sent.append(instance_id)

    def end(self) -> None:
        self._end.set()
        self.join()
        assert not self.refused
        for instance_id in self.sent:
            assert self.host.report(instance_id)["status"] == "success"


def test_no_task_and_no_dispatch_notices_a_reload(host: Host) -> None:
    task = host.sleeper("reloaded", "72004")
    before = main_pid()
    load = Load(host, "reload")
    load.start()
    try:
        command("systemctl", "reload", UNIT)
    finally:
        load.end()
    assert main_pid() == before
    assert lives("72004") == [task]
    host.finish("reloaded", task)


@pytest.mark.long
def test_reload_with_a_wrong_configuration_fails_and_the_worker_goes_on(host: Host) -> None:
    good = CONFIG.read_text()
    CONFIG.write_text(f"{good}\n[nonsense]\n")
    try:
        command("systemctl", "reload", UNIT, status=1)
    finally:
        CONFIG.write_text(good)
    host.run("after-refused-reload", "true")
    assert host.report("after-refused-reload")["status"] == "success"


def test_no_task_and_no_dispatch_notices_an_upgrade(host: Host) -> None:
    task = host.sleeper("upgraded", "72005")
    before = main_pid()
    version = command("stockade", "--version")
    load = Load(host, "upgrade")
    load.start()
    try:
        command("apt-get", "install", "-y", package(is_next=True))
    finally:
        load.end()
    assert command("stockade", "--version") != version
    assert main_pid() == before
    assert lives("72005") == [task]
    assert "was renewed and still finishes" in command("stockade", "ps")
    assert host.finish("upgraded", task)["signal"] == "SIGTERM"
    # Changed by the operator, and still the operator's.
    assert host.scheduler.url in CONFIG.read_text()


@pytest.mark.long
def test_watchdog_ends_a_stopped_event_loop_and_the_task_lives(host: Host) -> None:
    task = host.sleeper("watched", "72006")
    before = main_pid()
    os.kill(before, signal.SIGSTOP)
    started_anew(before)
    assert int(show("NRestarts")) >= 1
    assert lives("72006") == [task]
    host.finish("watched", task)


def test_a_token_comes_as_a_credential_and_no_task_reads_it(host: Host) -> None:
    secret = Path("/etc/stockade/token")
    secret.write_text("a-word-between-us\n")
    secret.chmod(0o600)
    drop_in = Path(f"/etc/systemd/system/{UNIT}.d/token.conf")
    drop_in.parent.mkdir()
    drop_in.write_text(f"[Service]\nLoadCredential=token:{secret}\n")
    credential = f"/run/credentials/{UNIT}/token"
    plain = CONFIG.read_text()
    with RecordingScheduler(token="a-word-between-us") as scheduler:
        secured = Host(scheduler, host.before)
        lines = f'[http]\ntoken_file = "{credential}"'
        text = plain.replace("[http]", lines, 1).replace(host.scheduler.url, scheduler.url)
        CONFIG.write_text(text)
        command("systemctl", "daemon-reload")
        command("systemctl", "restart", UNIT)
        try:
            scheduler.wait_for(lambda s: s.workers, deadline_s=PATIENCE_S)
            for moment in ("started", "reloaded"):
                status, _ = host.scheduler.dispatch(URL, schedule_instance_id="x", payload="true")
                assert status == 401
                secured.run(moment, f"cat {credential} {secret}; ls /run/credentials; true")
                assert "a-word" not in secured.report(moment)["error_message"]
                # Read anew by a process that is not root any more.
                command("systemctl", "reload", UNIT)
        finally:
            CONFIG.write_text(plain)
            drop_in.unlink()
            drop_in.parent.rmdir()
            secret.unlink()
            command("systemctl", "daemon-reload")
            command("systemctl", "restart", UNIT)
    eventually(lambda: show("StatusText") == "0 running, 0 queued, 0 undelivered", PATIENCE_S)


def test_stop_drains_and_kills_a_stubborn_task_and_leaves_nothing(host: Host) -> None:
    CONFIG.write_text(
        CONFIG.read_text().replace('#drain_timeout = "5min"', 'drain_timeout = "5s"', 1)
    )
    command("systemctl", "restart", UNIT)
    host.run("ends", "sleep 2", timeout_seconds=3000)
    host.run("stubborn", "trap '' TERM; while :; do sleep 72007; done", timeout_seconds=3000)
    eventually(lambda: lives("72007"), PATIENCE_S)
    command("systemctl", "stop", UNIT)
    assert host.report("ends")["status"] == "success"
    assert host.report("stubborn")["status"] == "cancelled"
    assert not lives("72007")
    assert show("Result") == "success"
    eventually(lambda: scope() == "", PATIENCE_S)
    assert not processes_that_name("stockade.sandbox")
    assert not os.listdir("/var/lib/stockade/work")


@pytest.mark.long
def test_wrong_configuration_is_not_tried_again(host: Host) -> None:
    good = CONFIG.read_text()
    CONFIG.write_text(f"{good}\n[nonsense]\n")
    try:
        command("systemctl", "start", UNIT, status=1)
        assert (show("ExecMainStatus"), show("ActiveState")) == ("78", "failed")
    finally:
        CONFIG.write_text(good)
    command("systemctl", "start", UNIT)


def test_remove_drains_and_keeps_the_configuration(host: Host) -> None:
    task = host.sleeper("removed", "72008")
    command("apt-get", "remove", "-y", "stockade")
    assert host.report("removed")["status"] == "cancelled"
    assert proc.process(task) is None
    assert host.scheduler.url in CONFIG.read_text()
    assert not Path("/usr/bin/stockade").exists()
    assert not processes_that_name("stockade.sandbox")


def test_purge_leaves_nothing(host: Host) -> None:
    command("apt-get", "purge", "-y", "stockade")
    assert files() - host.before == set()
    assert host.before - files() == set()
    assert "stockade" not in Path("/etc/passwd").read_text()
    assert "stockade" not in Path("/etc/group").read_text()
