"""The plan of a slot, which is pure: what is in it for which profile, view and host."""

from __future__ import annotations

import pytest

from stockade.platform import clone
from stockade.sandbox import slot_steps, system_steps
from stockade.sandbox.confinement import Confinement, confine, same_files
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.profiles import NEEDS, Feature, Profile, View

EVERYTHING = frozenset(Feature)
AS_USER = EVERYTHING - {Feature.OWN_UID, Feature.CGROUP_NAMESPACE}
LIMITS = Limits(memory_max=64 * MIB)


def plan(
    profile: Profile, available: frozenset[Feature] = EVERYTHING, **view: object
) -> Confinement:
    return confine(profile, View(**view), LIMITS, available)  # type: ignore[arg-type]


def names(confinement: Confinement) -> list[str]:
    return [str(step) for step in (*confinement.system, *confinement.slot)]


def test_each_profile_needs_all_that_the_one_before_needs() -> None:
    assert NEEDS[Profile.PROCESS] < NEEDS[Profile.PRIVATE] < NEEDS[Profile.SEALED]


def test_process_has_no_namespaces_and_sees_the_hosts_files() -> None:
    process = plan(Profile.PROCESS)
    assert not process.namespaces
    assert not process.has_own_files
    assert names(process) == ["join a new session keyring"]


@pytest.mark.parametrize("profile", [Profile.PRIVATE, Profile.SEALED])
def test_system_is_read_only_before_anything_is_mounted_on_it(profile: Profile) -> None:
    system = plan(profile).system
    first = next(i for i, s in enumerate(system) if isinstance(s, system_steps.ReadOnlySystem))
    assert not any(
        isinstance(step, (system_steps.Hide, system_steps.Show, system_steps.Devices))
        for step in system[:first]
    )


def test_only_sealed_has_landlock_and_a_network_of_its_own_by_itself() -> None:
    private, sealed = plan(Profile.PRIVATE), plan(Profile.SEALED)
    assert private.grants is None
    assert sealed.grants is not None
    assert not private.namespaces & clone.CLONE_NEWNET
    assert sealed.namespaces & clone.CLONE_NEWNET
    assert plan(Profile.PRIVATE, private_network=True).namespaces & clone.CLONE_NEWNET
    assert not plan(Profile.PROCESS, private_network=True).namespaces


def test_what_is_shown_is_kept_before_it_is_covered_and_attached_after() -> None:
    told = names(plan(Profile.PRIVATE, read_write_paths=("/home/data",)))
    keep, hide, show = map(
        told.index, ("keep /home/data, read-write", "hide /home", "show /home/data")
    )
    assert keep < told.index("make the whole system read-only, nosuid, nodev") < hide < show


def test_longer_path_comes_after_the_shorter_one() -> None:
    told = names(
        plan(
            Profile.PRIVATE,
            read_write_paths=("/srv", "/srv/a/b"),
            inaccessible_paths=("/srv/a",),
        )
    )
    order = [told.index(step) for step in ("show /srv", "hide /srv/a", "show /srv/a/b")]
    assert order == sorted(order)


def test_path_in_a_temporary_directory_is_shown_after_that_was_mounted() -> None:
    told = names(plan(Profile.PRIVATE, read_only_paths=("/tmp/data",)))
    mounted = next(i for i, name in enumerate(told) if name.startswith("mount new /tmp"))
    assert mounted < told.index("show /tmp/data")


def test_user_keeps_device_nodes_since_it_cannot_make_any() -> None:
    told = names(plan(Profile.PRIVATE, AS_USER))
    assert "keep the usual nodes of /dev" in told
    assert not any(name.startswith("unmount") for name in told)


@pytest.mark.parametrize("profile", Profile)
def test_host_without_namespaces_gets_no_step_that_needs_them(profile: Profile) -> None:
    less = plan(profile, frozenset({Feature.OWN_UID, Feature.SECCOMP}))
    assert (less.namespaces, less.system, less.grants) == (0, (), None)
    assert less.slot == (slot_steps.Keyring(),)


def test_temporary_directories_are_sized_by_memory() -> None:
    told = names(plan(Profile.PRIVATE))
    assert f"mount new /tmp and /var/tmp, together {32 * MIB} bytes" in told
    assert f"mount a new /dev/shm, {8 * MIB} bytes" in told


@pytest.mark.parametrize(
    ("profile", "wanted", "fits"),
    [
        (Profile.PROCESS, Limits(memory_max=MIB), True),
        (Profile.PROCESS, Limits(workdir_max=MIB), False),
        (Profile.PRIVATE, Limits(cpu_quota=0.5, runtime_max=1.0), True),
        (Profile.PRIVATE, Limits(memory_max=MIB), False),
        (Profile.SEALED, Limits(workdir_inodes_max=9), False),
    ],
)
def test_ready_slot_serves_what_asks_for_the_same_file_systems(
    profile: Profile, wanted: Limits, fits: bool
) -> None:
    assert same_files(profile, wanted, Limits()) is fits


@pytest.mark.parametrize("memory_max", [64 * MIB, 80 * MIB, 96 * MIB, None])
def test_slot_with_a_project_quota_does_not_serve_what_asks_for_a_tmpfs(
    memory_max: int | None,
) -> None:
    made = Limits(memory_max=64 * MIB, workdir_max=48 * MIB)
    wanted = Limits(memory_max=memory_max, workdir_max=48 * MIB)
    in_memory = memory_max is None or memory_max >= 96 * MIB
    assert same_files(Profile.PROCESS, wanted, made) is not in_memory
    assert same_files(Profile.PROCESS, made, wanted) is not in_memory
