"""How systemd is asked for a scope; that it gives one is test_lab_scope.py's."""

from __future__ import annotations

import pytest

from stockade.sandbox.systemd import Manager, job_in

SYSTEM, USER = Manager(None), Manager("/run/user/1000")


@pytest.mark.parametrize(
    ("manager", "group", "service"),
    [
        (SYSTEM, "/system.slice/stockade.service", "stockade.service"),
        (SYSTEM, "/system.slice/stockade.service/leaf", "stockade.service"),
        (SYSTEM, "/user.slice/user-0.slice/session-1.scope", None),
        (USER, "/user.slice/user-1000.slice/user@1000.service/app.slice/s.service", "s.service"),
        (USER, "/user.slice/user-1000.slice/user@1000.service/app.slice/run.scope", None),
        (USER, "/user.slice/user-1000.slice/session-1.scope", None),
        (SYSTEM, "/", None),
    ],
)
def test_the_service_that_a_group_belongs_to(
    manager: Manager, group: str, service: str | None
) -> None:
    assert manager.service_of(group) == service


def test_a_scope_is_delegated_without_a_limit_of_tasks_and_outlives_its_service() -> None:
    command = SYSTEM.scope_command("stockade-a.scope", "a.service")
    assert command[0] == "systemd-run"
    assert command[-1] == "--"
    assert {"--scope", "--unit=stockade-a.scope", "Delegate=yes", "TasksMax=infinity"} < set(
        command
    )
    assert "Before=a.service" in command
    assert "--user" not in command
    assert SYSTEM.environment() == {}


def test_a_user_asks_his_own_systemd() -> None:
    command = USER.scope_command(None, None)
    assert "--user" in command
    assert not any(word.startswith(("--unit", "Before")) for word in command)
    assert USER.environment() == {"XDG_RUNTIME_DIR": "/run/user/1000"}


LISTED = """  2 stockade.service      restart running
 71 stockade.service.old  stop    waiting
 72 other.service         start   waiting
"""


@pytest.mark.parametrize(
    ("unit", "kind"),
    [("stockade.service", "restart"), ("other.service", "start"), ("absent.service", "")],
)
def test_the_job_of_a_unit_is_told_by_its_own_line(unit: str, kind: str) -> None:
    assert job_in(LISTED, unit) == kind
    assert job_in("No jobs listed.\n", unit) == ""


def test_jobs_are_asked_of_the_systemd_that_has_the_service() -> None:
    command = USER.job_command("/usr/bin/systemctl", "s.service")
    assert command[:2] == ["/usr/bin/systemctl", "--user"]
    assert command[-1] == "s.service"
    assert "--user" not in SYSTEM.job_command("/usr/bin/systemctl", "s.service")
