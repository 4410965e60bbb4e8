"""cgroup v2: real groups; files of controllers that this host has not are plain files instead."""

import errno
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from stockade.platform import cgroup
from stockade.platform.cgroup_files import CpuMax
from stockade.platform.errors import SyscallError

MOUNT = cgroup.find_mount()
needs_cgroup = pytest.mark.skipif(
    MOUNT is None or os.geteuid() != 0, reason="needs root and a cgroup v2 mount"
)


@pytest.fixture
def group():
    assert MOUNT is not None
    group = cgroup.Group(MOUNT / f"stockade-test-cgroup-{os.getpid()}")
    group.create()
    yield group
    if group.exists:
        if group.populated:
            with_events = group.events_fd()
            group.kill()
            wait_until_empty(with_events)
            os.close(with_events)
        group.remove_tree()


@pytest.fixture
def sleeper(group):
    child = subprocess.Popen(["sleep", "60"])
    group.attach(child.pid)
    yield child
    child.kill()
    child.wait()


def read_populated(events_fd):
    try:
        return b"populated 1" in os.pread(events_fd, 4096, 0).splitlines()
    except OSError as error:
        if error.errno == errno.ENODEV:  # rmdir succeeds on an empty group only
            return False
        raise


def wait_until_empty(events_fd):
    poll = select.poll()
    poll.register(events_fd, select.POLLPRI)
    while read_populated(events_fd):
        assert poll.poll(10_000), "still populated"


@needs_cgroup
def test_the_mount_is_one():
    assert MOUNT is not None
    assert (MOUNT / "cgroup.procs").exists()
    assert (MOUNT / "cgroup.controllers").exists()


def test_our_own_group_is_that_of_proc():
    if MOUNT is None:
        pytest.skip("no cgroup v2 on this host")
    assert f"0::{cgroup.own_group()}" in Path("/proc/self/cgroup").read_text().splitlines()
    assert cgroup.group_of(os.getpid()) == cgroup.own_group()


def test_the_group_of_a_process_that_is_gone_is_none():
    child = subprocess.Popen(["true"])
    child.wait()
    assert cgroup.group_of(child.pid) is None


@needs_cgroup
def test_a_mount_with_another_root_than_the_cgroup_namespaces_is_not_taken_for_ours(group):
    """What a container with a cgroup namespace of its own sees of the host's tree."""
    code = """
import os, sys
from stockade.platform import cgroup, clone, namespaces
cgroup.Group(sys.argv[1]).attach(os.getpid())
namespaces.unshare(clone.CLONE_NEWCGROUP)
print(cgroup.own_group(), cgroup.find_mount(), cgroup.find_foreign_mount())
from stockade.sandbox.delegation import find_delegation
print(find_delegation().reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, os.fsdecode(group.path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"/ None {MOUNT}",
        f"the cgroup v2 mounted at {MOUNT} is that of another cgroup namespace",
    ]
    assert cgroup.find_foreign_mount() is None


@needs_cgroup
def test_a_new_group_is_empty(group):
    assert group.exists
    assert group.procs == []
    assert group.children() == []
    assert not group.populated
    assert group.subtree_control == frozenset()
    assert group.cpu_stat["usage_usec"] == 0


@needs_cgroup
def test_making_a_group_twice_is_eexist_and_removing_it_twice_enoent(group):
    with pytest.raises(SyscallError, match="EEXIST"):
        group.create()
    group.remove()
    assert not group.exists
    with pytest.raises(SyscallError, match="ENOENT"):
        group.remove()


@needs_cgroup
def test_attach_moves_a_process(group, sleeper):
    assert group.procs == [sleeper.pid]
    assert group.populated
    assert cgroup.group_of(sleeper.pid).endswith(os.fsdecode(group.path).rsplit("/", 1)[1])


@needs_cgroup
def test_a_list_that_is_longer_than_a_page_is_read_whole(group):
    loop = "echo $$ > $0/cgroup.procs; i=0; while [ $i -lt 900 ]; do sleep 60 & i=$((i + 1)); done"
    shell = subprocess.Popen(
        ["sh", "-c", f"{loop}; echo; wait", group.path], stdout=subprocess.PIPE
    )
    try:
        assert shell.stdout.read(1) == b"\n"
        assert len(set(group.procs)) == 901
    finally:
        group.kill()
        shell.communicate()
        wait_until_empty(fd := group.events_fd())
        os.close(fd)


@needs_cgroup
def test_a_populated_group_cannot_be_removed(group, sleeper):
    with pytest.raises(SyscallError, match="EBUSY"):
        group.remove()


@needs_cgroup
def test_kill_ends_everything_and_events_tell_when(group):
    child = subprocess.Popen(["sh", "-c", "kill -STOP $$; setsid sleep 60 & sleep 60"])
    group.attach(child.pid)
    events = group.events_fd()
    try:
        assert read_populated(events)
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        assert poll.poll(0) == []
        child.send_signal(18)
        group.kill()
        wait_until_empty(events)
        assert not group.populated
        group.remove()
        assert not read_populated(events)
    finally:
        os.close(events)
        child.kill()
        child.wait()


@needs_cgroup
def test_a_fresh_events_descriptor_is_ready_so_no_change_is_missed(group):
    events = group.events_fd()
    try:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        assert poll.poll(0)
        read_populated(events)
        assert not poll.poll(0)
    finally:
        os.close(events)


@needs_cgroup
def test_the_tree_goes_depth_first_and_absent_is_no_error(group):
    below = group.child("a").child(b"b")
    group.child("a").create()
    below.create()
    group.child("c").create()
    assert sorted(one.path for one in group.children()) == [group.path + b"/a", group.path + b"/c"]
    group.remove_tree()
    assert not group.exists
    group.remove_tree()


@needs_cgroup
def test_a_process_in_the_tree_keeps_it(group, sleeper):
    below = group.child("below")
    below.create()
    group.child("other").create()
    below.attach(sleeper.pid)
    with pytest.raises(SyscallError, match="EBUSY"):
        group.remove_tree()
    assert below.exists


@needs_cgroup
def test_descendants_are_limited(group):
    assert group.max_descendants == "max"
    group.max_descendants = 0
    assert group.max_descendants == 0
    with pytest.raises(SyscallError, match="EAGAIN"):
        group.child("below").create()
    group.max_descendants = None
    assert group.max_descendants == "max"
    group.max_descendants = "max"
    group.child("below").create()


@needs_cgroup
def test_what_the_kernel_says_of_a_value_is_not_lost(group):
    with pytest.raises(SyscallError, match=r"EINVAL|ERANGE") as failed:
        group.max_descendants = -2
    assert "cgroup.max.descendants" in str(failed.value)
    assert "-2" in str(failed.value)


@needs_cgroup
def test_a_controller_that_is_not_there_cannot_be_enabled(group):
    group.enable([])
    with pytest.raises(SyscallError, match=r"ENOENT|EINVAL"):
        group.enable(["memory", "nosuchcontroller"])


@needs_cgroup
def test_the_descriptor_is_a_directorys_and_not_inherited(group):
    fd = group.open()
    try:
        assert "cgroup.procs" in os.listdir(fd)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


LIMITS = ("memory_max", "memory_high", "memory_swap_max", "pids_max")


@needs_cgroup
@pytest.mark.parametrize(
    "name",
    [
        *LIMITS,
        *("memory_oom_group", "memory_peak", "memory_current", "memory_events"),
        *("pids_peak", "pids_events", "pids_current"),
        *("cpu_max", "cpu_weight", "io_weight", "io_stat"),
    ],
)
def test_a_file_that_is_absent_reads_as_none(name):
    # The root group has none of them, with and without controllers.
    if name in ("io_stat",):
        assert cgroup.Group("/nonexistent").io_stat is None
    else:
        assert getattr(cgroup.Group(MOUNT), name) is None


@needs_cgroup
@pytest.mark.parametrize(
    ("name", "value"),
    [*[(name, 4096) for name in LIMITS], ("cpu_max", (1000, 2000)), ("cpu_weight", 1)],
)
def test_a_file_that_is_absent_cannot_be_written(name, value):
    before = os.listdir(MOUNT)
    with pytest.raises(SyscallError, match=r"ENOENT|EACCES|EPERM"):
        setattr(cgroup.Group(MOUNT), name, value)
    assert os.listdir(MOUNT) == before


def test_populated_of_an_absent_group_is_an_error_and_not_false(tmp_path):
    with pytest.raises(SyscallError, match="ENOENT"):
        _ = cgroup.Group(tmp_path / "absent").populated


@pytest.mark.parametrize("name", ["memory_events", "pids_current", "cpu_stat", "procs", "io_stat"])
def test_what_can_only_be_read_cannot_be_set(tmp_path, name):
    with pytest.raises(RuntimeError, match="readonly"):
        setattr(cgroup.Group(tmp_path), name, {})


# As printed by the kernels of Debian 12 and 13.
TEXTS = {
    "memory.max": "67108864\n",
    "memory.high": "max\n",
    "memory.oom.group": "1\n",
    "memory.events": "low 0\nhigh 0\nmax 37\noom 1\noom_kill 3\noom_group_kill 1\n",
    "cpu.max": "max 100000\n",
    "cpu.weight": "100\n",
    "cpu.stat": "usage_usec 12\nuser_usec 8\nsystem_usec 4\n",
    "io.weight": "default 100\n8:16 200\n",
    "io.stat": "8:0 8:16 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0\n"
    "254:0 rbytes=5 wbytes=6 rios=1 wios=1 dbytes=0 dios=0\n",
    "cgroup.controllers": "cpuset cpu io memory pids\n",
    "cgroup.events": "populated 1\nfrozen 0\n",
    "memory.peak": "70000000\n",
    "cgroup.procs": "12\n13\n",
    "pids.events": "",
}


@pytest.fixture
def texts(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return cgroup.Group(tmp_path)


def test_the_kernels_texts_become_values(texts):
    assert texts.memory_max == 64 << 20
    assert texts.memory_high == "max"
    assert texts.memory_swap_max is None
    assert texts.memory_oom_group is True
    assert texts.memory_events["oom_kill"] == 3
    assert texts.memory_peak == 70_000_000
    assert texts.cpu_max == CpuMax(None, 100_000)
    assert texts.cpu_weight == 100
    assert texts.cpu_stat == {"usage_usec": 12, "user_usec": 8, "system_usec": 4}
    assert texts.io_weight == 100
    assert texts.io_stat["8:16"]["wbytes"] == 314_773_504
    assert texts.io_stat["254:0"]["rbytes"] == 5
    assert texts.controllers == {"cpuset", "cpu", "io", "memory", "pids"}
    assert texts.populated is True
    assert texts.procs == [12, 13]
    assert texts.pids_events == {}


@pytest.mark.parametrize(
    ("name", "value", "file", "text"),
    [
        ("memory_max", 4096, "memory.max", "4096"),
        ("memory_max", None, "memory.max", "max"),
        ("memory_oom_group", True, "memory.oom.group", "1"),
        ("cpu_max", (50_000, 100_000), "cpu.max", "50000 100000"),
        ("cpu_max", CpuMax(None), "cpu.max", "max 100000"),
        ("cpu_weight", 200, "cpu.weight", "200"),
        ("io_weight", 50, "io.weight", "default 50"),
    ],
)
def test_values_become_the_kernels_texts(tmp_path, name, value, file, text):
    (tmp_path / file).touch()
    setattr(cgroup.Group(tmp_path), name, value)
    assert (tmp_path / file).read_text() == text


def test_a_write_has_no_line_end_and_nothing_behind_it(tmp_path):
    os.mkfifo(tmp_path / "cpu.max")
    reader = os.open(tmp_path / "cpu.max", os.O_RDONLY | os.O_NONBLOCK)
    try:
        cgroup.Group(tmp_path).cpu_max = (1000, 100_000)
        assert os.read(reader, 100) == b"1000 100000"
        assert os.read(reader, 100) == b""
    finally:
        os.close(reader)


def test_an_error_of_the_write_is_told_with_the_file(tmp_path):
    (tmp_path / "memory.max").symlink_to("/dev/full")
    with pytest.raises(SyscallError, match=r"write\(.*memory.max.*ENOSPC") as failed:
        cgroup.Group(tmp_path).memory_max = 1
    assert failed.value.errno == errno.ENOSPC


V1_PIDS = Path("/sys/fs/cgroup/pids")


@pytest.mark.skipif(
    not (V1_PIDS / "cgroup.procs").exists() or os.geteuid() != 0,
    reason="needs root and a v1 pids hierarchy, whose files are those of v2",
)
def test_the_pids_controller_takes_our_limit():
    group = cgroup.Group(V1_PIDS / f"stockade-test-cgroup-{os.getpid()}")
    group.create()
    try:
        assert group.pids_max == "max"
        group.pids_max = 1
        child = subprocess.Popen(
            ["sh", "-c", "echo $$ > $0/cgroup.procs; (:) || echo refused", os.fsdecode(group.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        child.communicate(timeout=20)
        assert group.pids_events["max"] >= 1
        assert group.pids_max == 1
        assert group.pids_current == 0
    finally:
        group.remove()


@needs_cgroup
def test_enabled_controllers_limit_for_real(group):
    wanted = {"memory", "pids", "cpu"}
    if not wanted <= (group.controllers or set()):
        pytest.skip(f"needs the controllers {sorted(wanted)} in {MOUNT}")
    group.enable(wanted)
    assert group.subtree_control >= wanted
    below = group.child("task")
    below.create()
    below.memory_max = 64 << 20
    below.pids_max = 10
    below.cpu_max = (50_000, 100_000)
    below.cpu_weight = 50
    below.memory_oom_group = True
    assert (below.memory_max, below.pids_max, below.cpu_max, below.cpu_weight) == (
        64 << 20,
        10,
        CpuMax(50_000, 100_000),
        50,
    )
    assert below.memory_oom_group is True
    assert below.memory_events["oom_kill"] == 0
    assert below.pids_current == 0
