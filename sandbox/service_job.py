"""What systemd is about to do with the supervisor's service, which has no rights to ask itself.

A supervisor that gets SIGTERM cannot tell from it whether its service is stopped or restarted; the
job that systemd is running at that moment tells.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Final

from stockade.platform import cgroup
from stockade.sandbox import standby, systemd
from stockade.sandbox.children import Children
from stockade.sandbox.engine_call import Answer, Calls
from stockade.sandbox.loop import Loop
from stockade.sandbox.protocol import JobTold

ANSWER_S: Final = 10.0


class ServiceJobs:
    """Asks systemd, without waiting for it."""

    def __init__(self, loop: Loop, children: Children) -> None:
        self._loop = loop
        self._children = children

    def ask(self, pid: int, tell: Callable[[JobTold], None]) -> None:
        """Calls ``tell`` with the job of the service that process ``pid`` belongs to."""
        manager, reason, _ = systemd.find_manager()
        if not systemd.is_running() or manager is None:
            tell(JobTold("", reason or "systemd does not run this host"))
            return
        group = cgroup.group_of(pid)
        unit = None if group is None else manager.service_of(group)
        program = shutil.which("systemctl")
        if unit is None or program is None:
            tell(JobTold("", f"process {pid} is in no service: it is in {group}"))
            return
        calls = Calls(
            self._loop, self._children, {**standby.environment(), **manager.environment()}
        )

        def answered(answer: Answer) -> None:
            if answer.status != 0:
                tell(JobTold("", f"cannot ask systemd for the job of {unit}: {answer.error}"))
            else:
                tell(JobTold(systemd.job_in(answer.output, unit), ""))

        calls.call(manager.job_command(program, unit), answered, within_s=ANSWER_S)
