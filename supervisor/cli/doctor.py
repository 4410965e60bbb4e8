"""``stockade doctor``: what this host can enforce, what is missing, how to mend it, proof."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stockade.platform.errors import StockadeError
from stockade.sandbox import capabilities
from stockade.sandbox.capabilities import HostCapabilities, Missing
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.profiles import PROFILES, WHOLE_VIEW, Feature, Profile, needs
from stockade.supervisor.admission import cpu_stall
from stockade.supervisor.cli.control_client import ControlClient
from stockade.supervisor.cli.ended import CommandEnded
from stockade.supervisor.cli.operate import SocketOption, set_aside
from stockade.supervisor.config_defaults import host_defaults

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
_WIDTH: Final = 100
EXIT_NOT_CONTAINED: Final = 1


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Run hostile tasks here; exit 1 when one is not contained."),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            help=f"With --prove, which profile is to hold them: {', '.join(PROFILES)} "
            "[default: the strongest].",
            show_default=False,
        ),
    ] = None,
    socket: SocketOption = None,
) -> None:
    """List what this host can enforce, what is missing and how to mend it.

    Of a worker that runs here also the slots that it has set aside.
    """
    confined = _profile(profile, prove=prove)
    host = capabilities.probe(_work_directories(prove=prove))
    missing = find_missing(host)
    if prove:
        _prove(confined, host, _as_json(host, missing) if as_json else None)
        return
    worker = _worker(socket)
    if as_json:
        print(json.dumps({**_as_json(host, missing), "worker": worker}))
        return
    _print(host, missing)
    if worker is not None:
        found = set_aside(worker) if worker["slots_set_aside"] else "no slot is set aside"
        print(f"\nworker {worker['worker_id']}: {found}")


def _work_directories(*, prove: bool) -> str:
    """A directory above the work directories of a worker; with ``prove``, of the hostile tasks.

    What a user can have is the same everywhere.
    """
    if prove or os.geteuid() != 0:
        return tempfile.gettempdir()
    named = os.environ.get("STOCKADE_WORKER_STATE_DIR")
    return named or str(host_defaults(os.environ)["worker.state_dir"]())


def _worker(socket: Path | None) -> dict[str, Any] | None:
    """What a running worker says of its slots; None when none answers."""
    try:
        status = ControlClient(socket).get("/v1/status")
    except StockadeError:
        # Named by hand it must be there; else the host is looked at before a worker ever ran.
        if socket is not None:
            raise
        return None
    return {name: status[name] for name in ("worker_id", "slots_set_aside", "set_aside")}


def find_missing(host: HostCapabilities) -> dict[Profile, tuple[Missing, ...]]:
    """What this host cannot enforce, with every limit set, by profile."""
    return {profile: capabilities.missing(profile, _ALL, host) for profile in Profile}


def _profile(name: str | None, *, prove: bool) -> Profile:
    if name is not None and not prove:
        raise StockadeError("cannot use --profile without --prove: doctor shows every profile")
    try:
        return Profile.SEALED if name is None else Profile(name)
    except ValueError:
        raise StockadeError(
            f"cannot use --profile {name!r}: there are {', '.join(PROFILES)}"
        ) from None


# The table.


def _print(host: HostCapabilities, missing: Mapping[Profile, Sequence[Missing]]) -> None:
    print(f"kernel {host.kernel}, {'root' if host.root else 'not root'}")
    for line in _cgroups(host):
        print(line)

    _print_quotas(host)

    lacking = {entry.feature: entry for entries in missing.values() for entry in entries}
    print("\nlimits, in every profile")
    _print_list("yes", [name for name in _limits() if name not in lacking])
    _print_list("no", [name for name in _limits() if name in lacking])

    print(f"\n{'features':20}" + "".join(f"{profile:10}" for profile in Profile).rstrip())
    for feature in Feature:
        cells = [_cell(feature, profile, lacking) for profile in Profile]
        print(f"{feature:20}" + "".join(f"{cell:10}" for cell in cells).rstrip())

    if lacking:
        print("\nmissing")
        _print_missing(lacking.values())
    print("\n`stockade doctor --prove` runs hostile tasks here.")


def _cgroups(host: HostCapabilities) -> Iterator[str]:
    """Where the worker's tree would stand, and what it counts there."""
    if host.cgroup_parent is None:
        yield f"cgroup v2: none ({host.cgroup_reason})"
        return
    how = "a scope of systemd in" if host.cgroup_scope else "a group made by hand in"
    controllers = ", ".join(sorted(host.controllers)) or "none"
    yield f"cgroup v2: {how} {host.cgroup_parent}, controllers: {controllers}"
    if cpu_stall() is None:
        yield "pressure (PSI): not counted by this kernel, so starts are never held up for it"
        yield "  to mend: boot with psi=1"
    else:
        yield "pressure (PSI): counted"


def _print_quotas(host: HostCapabilities) -> None:
    """What holds a work directory that would not fit in its task's memory."""
    if host.lacks_project_quota is None:
        print("workdir_max above half of memory_max: by project quota")
        return
    why, mend = host.lacks_project_quota
    print("workdir_max above half of memory_max: not held")
    _print_indented("", why)
    _print_indented("to mend: ", mend)


def _limits() -> list[str]:
    # One feature stands for both quotas of the work directory.
    names = [field.name for field in dataclasses.fields(Limits)]
    return [name for name in names if name != "workdir_inodes_max"]


def _cell(feature: Feature, profile: Profile, lacking: Mapping[str, Missing]) -> str:
    if feature not in needs(profile, WHOLE_VIEW):
        return "-"
    return "no" if feature in lacking else "yes"


def _print_list(word: str, names: Sequence[str]) -> None:
    if names:
        text = textwrap.fill(
            ", ".join(names), _WIDTH, initial_indent=f"  {word:5}", subsequent_indent=" " * 7
        )
        print(text)


def _print_missing(entries: Iterable[Missing]) -> None:
    """Each once; those that the same thing mends together, that thing last."""
    by_mend: dict[str, dict[tuple[str, str], list[str]]] = {}
    for entry in entries:
        alike = by_mend.setdefault(entry.mend, {}).setdefault((entry.why, entry.instead), [])
        alike.append(entry.feature)
    for mend, found in by_mend.items():
        for (why, instead), names in found.items():
            _print_indented("", f"{', '.join(names)}: {why}")
            _print_indented("  instead: ", instead)
        _print_indented("  to mend: ", mend)


def _print_indented(label: str, text: str) -> None:
    indent = "  "
    print(
        textwrap.fill(
            label + text, _WIDTH, initial_indent=indent,
            subsequent_indent=indent + " " * (len(label) or 4),
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def _as_json(
    host: HostCapabilities, missing: Mapping[Profile, Sequence[Missing]]
) -> dict[str, Any]:
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


# The proof.


def _prove(profile: Profile, host: HostCapabilities, found: dict[str, Any] | None) -> None:
    """Prints one line a task as it ends; with ``found``, all at the end as a part of that."""
    from stockade.supervisor.cli.hostile_tasks import hostile_tasks
    from stockade.supervisor.cli.proof import FAILURES, Proof, Verdict
    from stockade.supervisor.cli.prove import prove

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            # As Ctrl-C: what is set up for the tasks is taken down.
            signal.signal(number, signal.default_int_handler)
    tasks = hostile_tasks(os.uname().machine)
    width = max(len(task.tries) for task in tasks)
    proofs: list[Proof] = []
    if found is None:
        print(f"profile {profile}, kernel {host.kernel}, {'root' if host.root else 'not root'}\n")
    for proof in prove(tasks, profile, host):
        proofs.append(proof)
        if found is None:
            print(f"{proof.verdict:15}{proof.tries:{width}}  {proof.evidence}", flush=True)
    counts = dict.fromkeys(Verdict, 0)
    for proof in proofs:
        counts[proof.verdict] += 1
    if found is None:
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        print(f"\nof {len(proofs)}: {told}")
    else:
        tried = [dataclasses.asdict(proof) for proof in proofs]
        print(json.dumps({**found, "proof": {"profile": profile, "tasks": tried, **counts}}))
    if any(counts[verdict] for verdict in FAILURES):
        raise CommandEnded(EXIT_NOT_CONTAINED)
