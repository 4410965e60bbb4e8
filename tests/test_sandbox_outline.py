"""The plan of a task: pure, and the same as what is done."""

from __future__ import annotations

import dataclasses
import inspect
import re
import resource
from pathlib import Path

from stockade.platform import cgroup
from stockade.sandbox import slot_groups
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.delegation import CONTROLLERS
from stockade.sandbox.launch_message import Step
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outline import Doer, Facts, PlannedStep, Wanted, outline
from stockade.sandbox.profiles import WHOLE_VIEW, Feature, Profile, View
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.slot import Making, SlotMaker

RICH = HostCapabilities(
    root=True,
    kernel="6.12",
    cgroup_parent="/sys/fs/cgroup",
    cgroup_scope=False,
    cgroup_reason="",
    cgroup_mend="",
    controllers=frozenset(CONTROLLERS),
    lacks={},
    cgroup_kill=True,
    obstacles={},
    disk="8:0",
    project_quota=None,
)
USER = dataclasses.replace(
    RICH,
    root=False,
    cgroup_parent=None,
    cgroup_reason="none",
    controllers=frozenset(),
    lacks=dict.fromkeys(CONTROLLERS, ("none", "mend")),
)


def steps(
    profile: Profile, limits: Limits, host: HostCapabilities, view: View = WHOLE_VIEW,
    directory: str | None = None,
) -> tuple[PlannedStep, ...]:  # fmt: skip
    wanted = Wanted([b"/bin/true"], [b"LANG=C"], directory, profile, limits, own_stdio=True)
    settings = SpawnerSettings(
        worker_id="w", runtime_dir="/r", state_dir="/s", supervisor_uid=0, supervisor_gid=0,
        uid_min=5000, uid_max=5999, profile=profile, view=view,
    )  # fmt: skip
    facts = Facts(host, "x86_64", None, {}, threads_of_user=7)
    return outline(wanted, settings, facts)


def done_by(doer: Doer, found: tuple[PlannedStep, ...]) -> list[str]:
    return [step.does for step in found if step.by is doer]


def details(found: tuple[PlannedStep, ...], does: str) -> tuple[str, ...]:
    return next(step.details for step in found if step.does.startswith(does))


def test_every_kernel_file_is_told_with_its_value() -> None:
    limits = Limits(
        memory_max=64 * MIB,
        cpu_quota=0.5,
        cpu_weight=20,
        tasks_max=9,
        io_weight=7,
        io_read_bandwidth_max=MIB,
    )
    found = details(steps(Profile.PROCESS, limits, RICH), "make a cgroup")
    assert found == (
        "in /sys/fs/cgroup/stockade-w.scope/tasks",
        "mkdir SLOT",
        "SLOT/cgroup.subtree_control = +cpu +io +memory +pids",
        "mkdir SLOT/init",
        "mkdir SLOT/task",
        "SLOT/task/cgroup.max.descendants = 0",
        f"SLOT/task/memory.max = {64 * MIB}",
        "SLOT/task/memory.swap.max = 0",
        "SLOT/task/memory.oom.group = 1",
        "SLOT/task/pids.max = 9",
        "SLOT/task/cpu.max = 50000 100000",
        "SLOT/task/cpu.weight = 20",
        "SLOT/task/io.weight = default 7",
        f"SLOT/task/io.max = 8:0 rbps={MIB} wbps=max",
    )


def test_plan_touches_no_group() -> None:
    mount = cgroup.find_mount() or Path("/sys/fs/cgroup")
    path = mount / "stockade-never-made"
    slot_groups.planned(path, frozenset(CONTROLLERS), Limits(), disk="8:0")
    assert not path.exists()


def test_as_root_the_system_is_made_once_before_the_slot() -> None:
    found = steps(Profile.PRIVATE, Limits(), RICH)
    doers = [step.by for step in found]
    assert doers == sorted(doers, key=list(Doer).index)
    zygote = done_by(Doer.ZYGOTE, found)
    assert zygote[0] == "be born in new namespaces: mount"
    assert "hide /home" in zygote
    child = done_by(Doer.CHILD, found)
    assert "be born in new namespaces: mount, pid, ipc, uts" in child
    assert "hide /home" not in child


def test_as_a_user_it_is_made_in_a_user_namespace() -> None:
    found = steps(Profile.PRIVATE, Limits(), USER)
    zygote = done_by(Doer.ZYGOTE, found)
    assert zygote[0] == "be born in new namespaces: user, mount"
    assert "hide /home" in zygote
    assert not any("uid" in step for step in done_by(Doer.SPAWNER, found))
    limits = details(found, "rlimit")
    # Those that the user's other threads count for are added.
    assert "RLIMIT_NPROC = 519:519" in limits


def test_what_the_host_lacks_is_not_in_the_plan() -> None:
    lacking = dataclasses.replace(
        RICH, obstacles={Feature.LANDLOCK: "x", Feature.SECCOMP: "x", Feature.PRIVATE_NETWORK: "x"}
    )
    full = str(steps(Profile.SEALED, Limits(), RICH))
    less = str(steps(Profile.SEALED, Limits(), lacking))
    for word in ("Landlock", "filter system calls", "loopback", "net"):
        assert word in full
        assert word not in less


def test_each_profile_does_all_that_the_weaker_one_does() -> None:
    previous: set[str] = set()
    for profile in Profile:
        found = steps(profile, Limits(), RICH)
        does = {re.sub(r"\d+ instructions|new namespaces: .*", "", step.does) for step in found}
        does -= {step for step in does if "directory: enter" in step}
        assert previous <= does
        assert len(does) > len(previous)
        previous = does


def test_view_and_directory_are_in_the_plan() -> None:
    view = View(read_only_paths=("/srv/data",), inaccessible_paths=("/opt",))
    found = steps(Profile.SEALED, Limits(), RICH, view, directory="/srv/data")
    assert {"keep /srv/data, read-only", "show /srv/data", "hide /opt"} <= set(
        done_by(Doer.ZYGOTE, found)
    )
    assert "directory: enter /srv/data" in done_by(Doer.LAUNCHER, found)


def test_limited_work_directory_is_told_with_its_size() -> None:
    limits = Limits(workdir_max=10 * MIB, workdir_inodes_max=99)
    (line,) = details(steps(Profile.PRIVATE, limits, RICH), "open the work directory")
    assert line.startswith(f"a tmpfs, mode=0700,size={10 * MIB},nr_inodes=100,uid=UID")
    assert line.endswith("as /run/task")


def test_work_directory_above_half_of_memory_is_told_with_its_project_quota() -> None:
    limits = Limits(memory_max=64 * MIB, workdir_max=48 * MIB, workdir_inodes_max=99)
    (line,) = details(steps(Profile.PROCESS, limits, RICH), "open the work directory")
    assert line == (
        f"on disk, with a project quota of {48 * MIB} bytes and 99 files, project UID; "
        "seen by the task as /s/work/SLOT"
    )
    lacking = dataclasses.replace(RICH, project_quota=("why", "mend"))
    (line,) = details(steps(Profile.PROCESS, limits, lacking), "open the work directory")
    assert line.startswith("on disk, without a quota; ")


def test_steps_of_the_launcher_are_told_in_its_order() -> None:
    names = [
        step.partition(":")[0]
        for step in done_by(Doer.LAUNCHER, steps(Profile.SEALED, Limits(), RICH))
    ]
    assert [name for name in names if name in set(Step)] == list(Step)


def test_slot_is_made_in_the_order_of_the_plan() -> None:
    source = inspect.getsource(SlotMaker.make)
    assert re.findall(r"step = Making\.(\w+)", source) == [making.name for making in Making]


def test_resource_limits_are_told_by_name() -> None:
    found = details(steps(Profile.PROCESS, Limits(limit_nofile=99), RICH), "rlimit")
    assert "RLIMIT_NOFILE = 99:99" in found
    assert resource.RLIMIT_NOFILE == resource.RLIMIT_OFILE
