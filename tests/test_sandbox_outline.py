"""The plan of a task: pure, and the same as what is done."""

from __future__ import annotations

import dataclasses
import inspect
import re
import resource
from collections.abc import Sequence
from pathlib import Path

from stockade.platform import cgroup
from stockade.sandbox import seccomp_policy, slot_groups
from stockade.sandbox.capabilities import HostCapabilities
from stockade.sandbox.delegation import CONTROLLERS
from stockade.sandbox.launch_message import INSTRUCTION_BYTES, Step
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
    directory: str | None = None, environment: Sequence[bytes] = (b"LANG=C",),
) -> tuple[PlannedStep, ...]:  # fmt: skip
    wanted = Wanted([b"/bin/true"], environment, directory, profile, limits)
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
    assert zygote[:3] == [
        "be born in new namespaces: mount",
        "set oom_score_adj and umask, whatever the worker's are",
        "make the whole system read-only, nosuid, nodev",
    ]
    assert "hide /home" in zygote
    child = done_by(Doer.CHILD, found)
    assert "be born in new namespaces: mount, pid, ipc, uts" in child
    assert "hide /home" not in child
    assert "directory: enter /run/task" in done_by(Doer.LAUNCHER, found)


def test_as_a_user_it_is_made_in_a_user_namespace() -> None:
    found = steps(Profile.PRIVATE, Limits(), USER)
    zygote = done_by(Doer.ZYGOTE, found)
    assert zygote[:3] == [
        "be born in new namespaces: user, mount",
        "set oom_score_adj and umask, whatever the worker's are",
        "map its own user and group into the user namespace",
    ]
    assert "hide /home" in zygote
    assert not any("uid" in step for step in done_by(Doer.SPAWNER, found))
    limits = details(found, "rlimit")
    # Those that the user's other threads count for are added.
    assert "RLIMIT_NPROC = 519:519" in limits


def test_what_only_root_and_a_tree_can_have_is_done_with_them_alone() -> None:
    rich, user = (steps(Profile.PRIVATE, Limits(), host) for host in (RICH, USER))
    apart = {
        doer: set(done_by(doer, rich)) ^ set(done_by(doer, user))
        for doer in (Doer.SPAWNER, Doer.LAUNCHER)
    }
    assert apart == {
        Doer.SPAWNER: {"give the task a uid", "make a cgroup"},
        Doer.LAUNCHER: {
            "clone: make the task's process, in SLOT/task",
            "clone: make the task's process",
            "namespace: enter a new cgroup namespace",
            "groups: leave every supplementary group",
            "gid: become the slot's gid",
            "uid: become the slot's uid",
            "meanwhile the launcher itself becomes uid 5000 and keeps CAP_KILL alone",
            "meanwhile the launcher drops its own capabilities",
        },
    }
    assert "clone: make the task's process, in SLOT/task" in done_by(Doer.LAUNCHER, rich)
    assert details(rich, "give the task a uid") == (
        "the next free one of 5001 to 5999, locked for this slot",
    )
    assert details(rich, "start a launcher") == ("clone3, by the zygote into SLOT/init",)
    assert details(user, "start a launcher") == ("clone3, by the zygote",)
    scope = dataclasses.replace(RICH, cgroup_scope=True)
    assert details(steps(Profile.PRIVATE, Limits(), scope), "make a cgroup")[0] == (
        "in /sys/fs/cgroup/stockade-w.scope/tasks, the scope being one of systemd's"
    )


def test_process_profile_maps_no_user_and_unshares_no_namespace() -> None:
    found = steps(Profile.PROCESS, Limits(), USER)
    assert done_by(Doer.ZYGOTE, found) == ["set oom_score_adj and umask, whatever the worker's are"]
    assert done_by(Doer.CHILD, found) == [
        "start a session",
        "become the launcher, which waits for the task",
    ]


def test_what_the_host_lacks_is_not_in_the_plan() -> None:
    lacking = dataclasses.replace(
        RICH, obstacles={Feature.LANDLOCK: "x", Feature.SECCOMP: "x", Feature.PRIVATE_NETWORK: "x"}
    )
    full = str(steps(Profile.SEALED, Limits(), RICH))
    less = str(steps(Profile.SEALED, Limits(), lacking))
    for word in ("Landlock", "filter system calls", "loopback", "net"):
        assert word in full
        assert word not in less


def test_ruleset_and_filter_are_told_with_what_is_in_them() -> None:
    found = steps(Profile.SEALED, Limits(), RICH)
    assert details(found, "make a Landlock ruleset") == (
        "read and execute: /",
        "write: /run/task, /tmp, /var/tmp, /dev/shm",
        "devices: /dev",
    )
    program = seccomp_policy.filter_of(Profile.SEALED, "x86_64")
    instructions = len(program) // INSTRUCTION_BYTES
    assert f"seccomp: filter system calls, {instructions} instructions" in done_by(
        Doer.LAUNCHER, found
    )


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
    done = done_by(Doer.LAUNCHER, steps(Profile.SEALED, Limits(), RICH))
    itself = done.index("meanwhile the launcher itself becomes uid 5000 and keeps CAP_KILL alone")
    # It goes on for itself once the task's process needs it no more.
    assert done[itself - 1].startswith(f"{Step.DESCRIPTORS}: ")
    del done[itself]
    assert [step.partition(":")[0] for step in done] == list(Step)


def test_slot_is_made_in_the_order_of_the_plan() -> None:
    source = inspect.getsource(SlotMaker.make)
    assert re.findall(r"step = Making\.(\w+)", source) == [making.name for making in Making]


def test_resource_limits_are_told_by_name() -> None:
    limits = Limits(limit_core=None, limit_nofile=99, limit_fsize=MIB, tasks_max=7)
    most = ("RLIMIT_NICE = 0:0", "RLIMIT_RTPRIO = 0:0", f"RLIMIT_FSIZE = {MIB}:{MIB}")
    # The controller counts the task's processes.
    assert details(steps(Profile.PROCESS, limits, RICH), "rlimit") == (
        *most,
        "RLIMIT_NOFILE = 99:99",
    )
    # Nothing counts them when there is no limit to hold.
    without = dataclasses.replace(limits, tasks_max=None, limit_core=5)
    assert details(steps(Profile.PROCESS, without, USER), "rlimit") == (
        *most[:2],
        "RLIMIT_CORE = 5:5",
        most[2],
        "RLIMIT_NOFILE = 99:99",
    )
    assert resource.RLIMIT_NOFILE == resource.RLIMIT_OFILE


def test_environment_is_told_by_name_with_the_slots_own_directory_once() -> None:
    sent = [b"LANG=C", b"HOME=/root", b"TMPDIR=/x", b"PWD=/y", b"WITH=a=b"]
    (told,) = details(steps(Profile.PROCESS, Limits(), RICH, environment=sent), "exec: ")
    assert told == "environment: LANG, WITH, HOME, TMPDIR, PWD"
