"""``stockade run --plan``: what would be done for a command on this host, step by step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile

from stockade.sandbox import capabilities
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.limits import Limits
from stockade.sandbox.outline import Facts, PlannedStep, Wanted, outline
from stockade.sandbox.profiles import Profile, View
from stockade.supervisor.cli.sandboxed import RUN_PREFIX, settings_of
from stockade.supervisor.process_plan import ProcessPlan


def print_plan(
    plan: ProcessPlan, limits: Limits, profile: Profile, view: View, host: HostCapabilities, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Prints the steps, and what this host cannot enforce; as text or as one JSON object."""
    directory = os.path.join(tempfile.gettempdir(), f"{RUN_PREFIX}NAME")
    wanted = Wanted(
        argv=[os.fsencode(argument) for argument in plan.argv],
        environment=[os.fsencode(f"{name}={value}") for name, value in plan.environment.items()],
        directory=plan.directory,
        profile=profile,
        limits=limits,
    )
    steps = outline(wanted, settings_of(directory, profile, view), Facts.gather(host))
    missing = capabilities.missing(profile, limits, host, view)
    if as_json:
        print(
            json.dumps(
                {
                    "profile": profile,
                    "steps": [dataclasses.asdict(step) for step in steps],
                    "missing": [dataclasses.asdict(entry) for entry in missing],
                }
            )
        )
        return
    print(f"profile {profile}")
    number = itertools.count(1)
    for doer, done in itertools.groupby(steps, key=lambda step: step.by):
        print(f"\n{doer}")
        for step in done:
            _print_step(next(number), step)
    print("\nnot enforced on this host" if missing else "\nall of it can be enforced on this host")
    for entry in missing:
        print(f"  {entry.feature}: {entry.why}; instead: {entry.instead}")


def _print_step(number: int, step: PlannedStep) -> None:
    print(f"  {number:3}  {step.does}")
    for line in step.details:
        print(f"         {line}")
