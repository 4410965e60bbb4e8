"""One spawner's way to confine: plans for (profile, limits), and what their slots share."""

from __future__ import annotations

import os

from stockade.sandbox import capabilities, oom_score, seccomp_policy
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.child import Ground
from stockade.sandbox.confinement import Confinement, confine
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile, View
from stockade.sandbox.template import Template, resolv_conf_in_run
from stockade.sandbox.work_directory import WorkDirectory, temporary_bytes


class Confiner:
    """Plans slots and says where their children start from.

    Raises:
        SandboxSetupError: what the view names cannot be shown.
    """

    def __init__(self, view: View, host: HostCapabilities) -> None:
        self._view = view.resolved()
        self._host = host
        self._oom_score_adj = oom_score.of_tasks()
        self._resolv_conf = resolv_conf_in_run()
        self._plans: dict[tuple[Profile, int | None], Confinement] = {}
        self._template: Template | None = None
        self._filters = dict.fromkeys(Profile, b"")
        if Feature.SECCOMP in host.available:
            machine = os.uname().machine
            self._filters = {each: seccomp_policy.filter_of(each, machine) for each in Profile}
        plan = self.plan(Profile.PRIVATE, Limits())
        if host.root and plan.has_own_files:
            self._template = Template(plan.system, self._resolv_conf)
            self._template.open()

    def plan(self, profile: Profile, limits: Limits) -> Confinement:
        """The plan of a slot."""
        key = (profile, temporary_bytes(limits))
        if key not in self._plans:
            self._plans[key] = confine(
                profile, self._view, limits, self._host.available, self._resolv_conf
            )
        return self._plans[key]

    def files(self, limits: Limits) -> Limits:
        """The limits that a slot's files are made with: without a quota that cannot be held."""
        return capabilities.without_lost_quota(limits, self._host)

    def ground(self, plan: Confinement, work: WorkDirectory, work_path: str) -> Ground:
        """Where the slot's child starts from.

        Raises:
            SandboxSetupError: the template had to be made again, and cannot be.
        """
        template = -1
        if plan.has_own_files and self._template is not None:
            template = self._template.open()
        return Ground(
            plan, template, work.mount, work_path, os.geteuid(), os.getegid(), self._oom_score_adj
        )

    def filter_of(self, profile: Profile) -> bytes:
        """The task's seccomp program; empty where the kernel has none."""
        return self._filters[profile]
