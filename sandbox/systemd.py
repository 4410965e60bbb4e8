"""Scopes of systemd: the way to a group of our own where systemd owns the cgroup tree.

A scope and not the service's own group: a service whose main process moved itself to a leaf and
enabled controllers cannot be started again while a task lives there (systemd tries to attach the
new process to a group that may not hold any; 252 fails with 219/CGROUP, 257 with EBUSY). A scope of
its own also lives on when the service crashes, is stopped or is upgraded.

Source: systemd-run(1), systemd.scope(5), systemd.resource-control(5).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

# sd_booted(3).
_RUNNING: Final = Path("/run/systemd/system")
# A system manager that does not answer within this does not work; the command itself waits longer.
_ANSWER_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Manager:
    """The systemd that scopes are asked of.

    Attributes:
        runtime_dir: of the user whose own systemd it is; None for the system's.
    """

    runtime_dir: str | None

    def environment(self) -> dict[str, str]:
        """What systemd-run and systemctl need to find it."""
        return {} if self.runtime_dir is None else {"XDG_RUNTIME_DIR": self.runtime_dir}

    def scope_command(self, unit: str | None, before: str | None) -> list[str]:
        """A prefix that runs a command, as a child of its caller, in a delegated scope.

        Args:
            unit: the scope's name; None for any.
            before: a unit that is stopped before the scope is, at power-off above all.
        """
        command = ["systemd-run", *self._scope_of(), "--scope", "--quiet", "--collect"]
        if unit is not None:
            command.append(f"--unit={unit}")
        for assignment in ("Delegate=yes", "TasksMax=infinity"):
            command += ["-p", assignment]
        if before is not None:
            command += ["-p", f"Before={before}"]
        return [*command, "--"]

    def state_of(self, unit: str) -> tuple[str, str]:
        """The unit's ActiveState (``inactive`` when there is none) and its group's path.

        Raises:
            OSError: systemctl cannot be run.
        """
        found = subprocess.run(
            ["systemctl", *self._scope_of(), "show", "-p", "ActiveState,ControlGroup", unit],
            env={**os.environ, **self.environment()}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=_ANSWER_S,
        )  # fmt: skip
        if found.returncode != 0:
            raise OSError(f"cannot ask systemd for {unit}: {found.stderr.strip()}")
        table = dict(line.split("=", 1) for line in found.stdout.splitlines() if "=" in line)
        return table.get("ActiveState", "inactive"), table.get("ControlGroup", "")

    def job_command(self, program: str, unit: str) -> list[str]:
        """What prints the jobs of a unit; `job_in` reads it.

        Args:
            program: systemctl's path.
            unit: its name.
        """
        return [program, *self._scope_of(), "--no-legend", "--no-pager", "list-jobs", "--", unit]

    def service_of(self, group: str) -> str | None:
        """The service of this systemd that a group (its path) belongs to; None for a login, say."""
        services = [name for name in group.split("/") if name.endswith(".service")]
        if self.runtime_dir is not None:
            # A user's systemd is itself a service of the system's.
            services = [name for name in services if not name.startswith("user@")]
        return services[0] if services else None

    def _scope_of(self) -> list[str]:
        return [] if self.runtime_dir is None else ["--user"]


def job_in(listed: str, unit: str) -> str:
    """The type of a unit's job, such as ``stop`` or ``restart``, by list-jobs; empty for none."""
    for line in listed.splitlines():
        # The job's number, unit, type and state.
        words = line.split()
        if len(words) >= 3 and words[1] == unit:
            return words[2]
    return ""


def is_running() -> bool:
    """Whether systemd runs this host, or this container."""
    return _RUNNING.is_dir()


def find_manager() -> tuple[Manager | None, str, str]:
    """The systemd that would give us a scope; or None, why there is none, and what mends it."""
    for program in ("systemd-run", "systemctl"):
        if shutil.which(program) is None:
            return None, f"there is no {program}", "install systemd's own tools"
    if os.geteuid() == 0:
        return Manager(None), "", ""
    uid = os.geteuid()
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    if not os.path.exists(os.path.join(runtime_dir, "systemd/private")):
        return (
            None,
            f"no systemd of the user runs ({runtime_dir}/systemd/private is missing)",
            f"as root: loginctl enable-linger {uid}; then set XDG_RUNTIME_DIR=/run/user/{uid}",
        )
    return Manager(runtime_dir), "", ""
