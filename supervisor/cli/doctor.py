"""``stockade doctor``: what this host can enforce, what is missing and how to mend it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from stockade.sandbox import capabilities
from stockade.sandbox.capabilities import HostCapabilities, Missing
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.profiles import WHOLE_VIEW, Feature, Profile, needs
from stockade.supervisor.admission import cpu_stall

# Every limit set, so that whatever the host cannot enforce shows.
_ALL: Final = Limits(
    memory_high=128 * MIB,
    cpu_quota=1.0,
    cpu_weight=100,
    io_weight=100,
    io_read_bandwidth_max=MIB,
    io_write_bandwidth_max=MIB,
    limit_fsize=MIB,
    workdir_max=MIB,
    workdir_inodes_max=100,
)


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """List what this host can enforce, what is missing and how to mend it."""
    host = capabilities.probe(tempfile.gettempdir())
    missing = {profile: capabilities.missing(profile, _ALL, host) for profile in Profile}
    if as_json:
        print(json.dumps(_as_json(host, missing)))
        return
    print(f"kernel {host.kernel}, {'root' if host.root else 'not root'}")
    for line in _cgroups(host):
        print(line)
    for profile, entries in missing.items():
        lacking = {entry.feature: entry for entry in entries}
        print(f"\nprofile {profile}:")
        for feature in _features(profile):
            entry = lacking.get(feature)
            print(f"  {'no ' if entry else 'yes'}  {feature}")
            if entry is not None:
                print(f"         {entry.why}")
                print(f"         instead: {entry.instead}")
                print(f"         to mend: {entry.mend}")


def _cgroups(host: HostCapabilities) -> Iterator[str]:
    """Where the worker's tree would stand, and what it lacks there."""
    if host.cgroup_parent is None:
        yield f"cgroup v2: none ({host.cgroup_reason})"
        yield f"  to mend: {host.cgroup_mend}"
        return
    how = "a scope of systemd in" if host.cgroup_scope else "a group made by hand in"
    controllers = ", ".join(sorted(host.controllers)) or "none"
    yield f"cgroup v2: {how} {host.cgroup_parent}, controllers: {controllers}"
    for name, (why, mend) in host.lacks.items():
        yield f"  no {name}: {why}"
        yield f"     to mend: {mend}"
    if cpu_stall() is None:
        yield "pressure (PSI): not counted by this kernel, so starts are never held up for it"
        yield "  to mend: boot with psi=1"
    else:
        yield "pressure (PSI): counted"


def _features(profile: Profile) -> list[str]:
    # One feature stands for both quotas of the work directory.
    limits = [
        field.name for field in dataclasses.fields(Limits) if field.name != "workdir_inodes_max"
    ]
    return [*limits, *(feature for feature in Feature if feature in needs(profile, WHOLE_VIEW))]


def _as_json(host: HostCapabilities, missing: dict[Profile, tuple[Missing, ...]]) -> dict[str, Any]:
    return {
        "host": {**dataclasses.asdict(host), "controllers": sorted(host.controllers)},
        "profiles": {
            profile: {
                "missing": [dataclasses.asdict(entry) for entry in entries],
                "complete": not entries,
            }
            for profile, entries in missing.items()
        },
    }
