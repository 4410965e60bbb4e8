"""One spawner's way to confine: plans for (profile, limits), and the launchers that follow them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from stockade.sandbox import capabilities, oom_score, seccomp_policy
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.confinement import Confinement, confine
from stockade.sandbox.limits import Limits
from stockade.sandbox.profiles import Feature, Profile, View
from stockade.sandbox.slot_program import SlotProgram
from stockade.sandbox.work_directory import temporary_bytes
from stockade.sandbox.zygote import Zygotes, resolv_conf_in_run

# Most workers see a handful of limits; each plan that is kept holds a descriptor.
_PLANS_MAX: Final = 64


class Plan(NamedTuple):
    """What a slot is to be, and the program that makes its child so."""

    confinement: Confinement
    program: SlotProgram


class Confiner:
    """Plans slots and makes their launchers.

    Raises:
        SandboxSetupError: what the view names cannot be shown.
    """

    def __init__(self, view: View, host: HostCapabilities, work_path: str) -> None:
        self._view = view.resolved()
        self._host = host
        self._resolv_conf = resolv_conf_in_run()
        self._plans: OrderedDict[tuple[Profile, int | None], Plan] = OrderedDict()
        self._filters = dict.fromkeys(Profile, b"")
        if Feature.SECCOMP in host.available:
            machine = os.uname().machine
            self._filters = {each: seccomp_policy.filter_of(each, machine) for each in Profile}
        self._zygotes = Zygotes(
            as_root=host.root, work_path=work_path, oom_score_adj=oom_score.of_tasks()
        )
        # Here, and not with the first task: what cannot be shown is to stop the start.
        try:
            for profile in (Profile.PROCESS, Profile.PRIVATE):
                self._zygotes.of(self.plan(profile, Limits()).confinement.system)
        except BaseException:
            self._zygotes.close()
            raise

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        """The plan of a slot.

        Raises:
            SandboxSetupError: it is too long.
        """
        key = (profile, temporary_bytes(limits))
        found = self._plans.get(key)
        if found is None:
            confinement = confine(
                profile, self._view, limits, self._host.available, self._resolv_conf
            )
            found = self._plans[key] = Plan(confinement, SlotProgram(confinement))
            if len(self._plans) > _PLANS_MAX:
                self._plans.popitem(last=False)[1].program.close()
        self._plans.move_to_end(key)
        return found

    def files(self, limits: Limits) -> Limits:
        """The limits that a slot's files are made with: without a quota that cannot be held."""
        return capabilities.without_lost_quota(limits, self._host)

    def make_launcher(
        self, plan: Plan, slot: str, cgroup_fd: int | None, table: Sequence[int]
    ) -> tuple[int, int]:
        """The launcher of the slot of this name: its pid and pidfd.

        Args:
            plan: the slot's.
            slot: its name.
            cgroup_fd: the group that the launcher starts in.
            table: its descriptors 0, 1, 2, ...

        Raises:
            OSError: it cannot be made.
            SandboxSetupError: the same.
        """
        program_fd = plan.program.open(slot)
        try:
            system, namespaces = plan.confinement.system, plan.confinement.namespaces
            return self._zygotes.make(system, namespaces, cgroup_fd, program_fd, table)
        finally:
            os.close(program_fd)

    def close(self) -> None:
        """Makes no more launchers; those that there are stay."""
        self._zygotes.close()

    def filter_of(self, profile: Profile) -> bytes:
        """The task's seccomp program; empty where the kernel has none."""
        return self._filters[profile]
