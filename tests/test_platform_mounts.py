"""Mounts, each in a mount namespace of its own, in a process of its own."""

import os

import mountinfo
import pytest
from python_process import run_python

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PROLOGUE = """
import errno, os, stat, sys
import mountinfo
from stockade.platform import clone, mounts, namespaces
from stockade.platform.mounts import *
place = sys.argv[1]
def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
def at(target):
    return [one for one in mountinfo.read_mounts() if one.target == target]
def write(path):
    with open(path, "w") as file:
        file.write("x")
def make_private(path):
    set_attributes(path, flags=AT_RECURSIVE, propagation=MS_PRIVATE)
namespaces.unshare(clone.CLONE_NEWNS)
make_private("/")
"""


def run_inside(place, script: str) -> None:
    """Runs it in a new mount namespace; in the host's nothing changes by it."""
    before = mountinfo.read_mounts()
    run_python(PROLOGUE + script, str(place))
    after = {one.mount_id: one for one in mountinfo.read_mounts()}
    assert not [one for one in after.values() if one.target.startswith(str(place))]
    # What tests beside this one mount and unmount is not ours.
    for one in before:
        now = after.get(one.mount_id)
        assert now is None or now.target != one.target or now == one


def test_private_mounts_do_not_reach_the_parent_namespace(tmp_path):
    run_inside(
        tmp_path,
        """
assert not any(one.propagation for one in mountinfo.read_mounts())
mount("name", place, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m")
(found,) = at(place)
assert (found.kind, found.source) == ("tmpfs", "name")
assert {"nosuid", "nodev", "rw"} <= found.options
""",
    )


def test_private_cuts_a_shared_mount_off(tmp_path):
    run_inside(
        tmp_path,
        """
mount("shared", place, "tmpfs", 0)
set_attributes(place, propagation=MS_SHARED)
os.mkdir(place + "/inner")
pid, fd = clone.clone3(clone.CLONE_NEWNS)
if pid == 0:
    os._exit(not at(place)[0].propagation)
assert os.waitpid(pid, 0)[1] == 0
pid, fd = clone.clone3(clone.CLONE_NEWNS)
if pid == 0:
    make_private("/")
    mount("secret", place + "/inner", "tmpfs", 0)
    os._exit(bool(at(place)[0].propagation))
assert os.waitpid(pid, 0)[1] == 0
assert at(place + "/inner") == []
""",
    )


def test_read_only_reaches_the_mounts_below_and_not_other_namespaces(tmp_path):
    run_inside(
        tmp_path,
        """
mount("outer", place, "tmpfs", 0)
os.mkdir(place + "/inner")
mount("inner", place + "/inner", "tmpfs", 0)
pid, fd = clone.clone3(clone.CLONE_NEWNS)
if pid == 0:
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID
    set_attributes(place, flags=AT_RECURSIVE, add=flags)
    bad = [one for one in (*at(place), *at(place + "/inner"))
           if not {"ro", "nosuid"} <= one.options]
    denied = {error_of(write, place + "/x"), error_of(write, place + "/inner/x")}
    set_attributes(place, remove=MOUNT_ATTR_RDONLY)
    write(place + "/again")
    os._exit(bool(bad) or denied != {"EROFS"})
assert os.waitpid(pid, 0)[1] == 0
write(place + "/x")
write(place + "/inner/x")
""",
    )


def test_whole_system_can_be_made_read_only_in_one_call(tmp_path):
    run_inside(
        tmp_path,
        """
set_attributes("/", flags=AT_RECURSIVE, add=MOUNT_ATTR_RDONLY, propagation=MS_PRIVATE)
assert all("ro" in one.options for one in mountinfo.read_mounts())
assert error_of(write, place + "/x") == "EROFS"
assert error_of(os.mkdir, "/etc/new") == "EROFS"
""",
    )


def test_tmpfs_has_its_limits_mode_and_owner(tmp_path):
    run_inside(
        tmp_path,
        """
options = {"source": "private", "size": "65536", "nr_inodes": "5", "mode": "1777", "uid": "65534"}
fd = new_file_system("tmpfs", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)
assert not os.get_inheritable(fd)
assert at(place) == []
attach(fd, place)
os.close(fd)
status = os.stat(place)
assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o1777, 65534)
(found,) = at(place)
assert {"nosuid", "nodev", "noexec"} <= found.options and found.source == "private"
for number in range(4):
    write(f"{place}/{number}")
assert error_of(write, place + "/4") == "ENOSPC"
file = os.open(place + "/0", os.O_WRONLY)
assert os.write(file, bytes(200000)) == 61440  # the other files have a page each
""".replace("61440  # the other files have a page each", "65536 - 3 * 4096"),
    )


def test_refused_file_system_says_what_the_kernel_said(tmp_path):
    run_inside(
        tmp_path,
        """
try:
    new_file_system("tmpfs", {"sighs": "1"})
except OSError as error:
    assert error.errno == errno.EINVAL and error.call == "fsconfig"
    assert "tmpfs" in error.arguments and "sighs" in error.arguments, error.arguments
else:
    raise AssertionError
assert error_of(new_file_system, "nonesuch") == "ENODEV"
before = os.listdir("/proc/self/fd")
error_of(new_file_system, "tmpfs", {"size": "many"})
assert os.listdir("/proc/self/fd") == before
""",
    )


def test_tree_made_in_one_namespace_can_be_attached_in_another(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").write_text("x")
    run_inside(
        tmp_path,
        """
tree = open_tree(place + "/work")
set_attributes("", fd=tree, flags=AT_EMPTY_PATH, add=MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
pid, fd = clone.clone3(clone.CLONE_NEWNS)
if pid == 0:
    set_attributes("/", flags=AT_RECURSIVE, add=MOUNT_ATTR_RDONLY)
    mount("cover", place, "tmpfs", 0)
    os.mkdir(place + "/here")
    attach(tree, place + "/here")
    set_attributes(place, add=MOUNT_ATTR_RDONLY)
    write(place + "/here/new")
    os._exit(os.listdir(place) != ["here"] or error_of(write, place + "/x") != "EROFS")
assert os.waitpid(pid, 0)[1] == 0
assert sorted(os.listdir(place + "/work")) == ["file", "new"]
""",
    )


def test_single_file_can_be_covered_by_another(tmp_path):
    (tmp_path / "secret").write_text("x")
    run_inside(
        tmp_path,
        """
tree = open_tree("/dev/null")
attach(tree, place + "/secret")
assert open(place + "/secret").read() == ""
assert error_of(unmount, place + "/secret") == "EBUSY"  # its descriptor is still open
os.close(tree)
unmount(place + "/secret", UMOUNT_NOFOLLOW)
assert open(place + "/secret").read() == "x"
assert error_of(unmount, place + "/secret") == "EINVAL"
assert error_of(unmount, place + "/none") == "ENOENT"
file = os.open("/dev/null", os.O_PATH)
target = os.open(place + "/secret", os.O_PATH)
attach(open_tree("", fd=file, flags=AT_EMPTY_PATH), "", fd=target)
assert open(place + "/secret").read() == ""
""",
    )


def test_device_nodes_can_be_made_before_the_file_system_is_seen(tmp_path):
    run_inside(
        tmp_path,
        """
fd = new_file_system("tmpfs", {"mode": "755"}, MOUNT_ATTR_NOSUID)
os.umask(0)
try:
    os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3), dir_fd=fd)
except PermissionError:
    sys.exit(0)  # no CAP_MKNOD on this host: nodes are bound instead, as the next test does
os.symlink("/proc/self/fd", "fd", dir_fd=fd)
attach(fd, place)
set_attributes(place, add=MOUNT_ATTR_RDONLY)
write(place + "/null")
assert error_of(write, place + "/other") == "EROFS"
set_attributes(place, add=MOUNT_ATTR_NODEV)
assert error_of(write, place + "/null") == "EACCES"
""",
    )


def test_device_nodes_of_the_host_can_be_bound(tmp_path):
    run_inside(
        tmp_path,
        """
fd = new_file_system("tmpfs", {"mode": "755"}, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
os.close(os.open("null", os.O_CREAT, 0o444, dir_fd=fd))
node = open_tree("/dev/null")
attach(fd, place)
attach(node, place + "/null")
write(place + "/null")
assert stat.S_ISCHR(os.stat(place + "/null").st_mode)
""",
    )


def test_proc_and_terminals_of_its_own(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "pts").mkdir()
    run_inside(
        tmp_path,
        """
import pty, termios
pid, fd = clone.clone3(clone.CLONE_NEWPID)
if pid == 0:
    attach(new_file_system("proc", {"hidepid": "invisible"}, MOUNT_ATTR_NOSUID), place + "/proc")
    seen = [name for name in os.listdir(place + "/proc") if name.isdecimal()]
    os._exit(seen != ["1"] or "hidepid=invisible" not in
             mountinfo.read_mounts()[-1].super_options)
assert os.waitpid(pid, 0)[1] == 0
options = {"newinstance": None, "ptmxmode": "0666", "mode": "0620"}
attach(new_file_system("devpts", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), place + "/pts")
assert os.listdir(place + "/pts") == ["ptmx"]
leader = os.open(place + "/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
assert "0" in os.listdir(place + "/pts")
""",
    )


def test_failed_calls_name_themselves_and_what_they_were_asked(tmp_path):
    run_inside(
        tmp_path,
        """
for call, arguments in (
    (mount, (None, "/none", None, MS_BIND)),
    (unmount, ("/none",)),
    (open_tree, ("/none",)),
    (make_private, ("/none",)),
    (attach, (0, "/none")),
):
    try:
        call(*arguments)
    except OSError as error:
        assert error.call and "/none" in error.arguments, error
    else:
        raise AssertionError(call)
""",
    )
