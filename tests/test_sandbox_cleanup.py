"""What tasks leave behind, removed: by root and by an ordinary user, on the real file system."""

import errno
import os
import resource
import socket
import subprocess
import sys
import tracemalloc

import pytest

from stockade.sandbox import cleanup, unprotect
from stockade.sandbox.errors import SandboxSetupError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ORDINARY_UID = 1_900_000_000 + os.getpid()


@pytest.fixture
def parent(tmp_path):
    """The parent directory as descriptor; beside ``work``, which tests fill, lies a bystander."""
    bystander = tmp_path / "bystander"
    bystander.mkdir()
    (bystander / "file").write_text("untouched")
    (tmp_path / "work").mkdir()
    tmp_path.chmod(0o755)
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)
    assert (bystander / "file").read_text() == "untouched"


def run_as(uid, function):
    """Runs a function in a forked child that became another uid; its error fails the test."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if uid != os.getuid():
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            function()
            status = 0
        except BaseException as error:  # noqa: BLE001
            os.write(2, repr(error).encode())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture(
    params=[
        os.getuid(),
        pytest.param(ORDINARY_UID, marks=needs_root),
    ],
    ids=["self", "ordinary"],
)
def owner(request, tmp_path):
    """Who leaves the tree and who removes it: root leaves and removes, or an ordinary user both."""
    if request.param != os.getuid():
        os.chown(tmp_path / "work", request.param, request.param)
        os.chown(tmp_path, request.param, request.param)
    return request.param


def leave(script, tmp_path, owner):
    """Lets the shell leave something in the work directory."""
    fd = os.open(tmp_path / "work", os.O_RDONLY | os.O_DIRECTORY)
    try:
        run_as(owner, lambda: (os.fchdir(fd), subprocess.run(["bash", "-c", script], check=True)))
    finally:
        os.close(fd)


def remove(parent, owner, name=b"work"):
    before = set(os.listdir("/proc/self/fd"))
    run_as(owner, lambda: cleanup.remove_tree(parent, name))
    assert set(os.listdir("/proc/self/fd")) == before
    assert name not in os.listdir(b"/proc/self/fd/%d" % parent)


LEFT = {
    "nothing": "",
    "plain files": "mkdir -p a/b/c; touch a/1 a/b/2 a/b/c/3 4",
    "read-only directories": "mkdir -p a/b; touch a/b/f; chmod 500 a/b a",
    "directories without permissions": "mkdir -p a/b/c; touch a/b/c/f a/f; chmod 000 a/b/c a/b a",
    "a work directory without permissions": "mkdir a; chmod 000 .",
    "files without permissions": "touch f; chmod 000 f",
    "names that are no text": r"""touch $'\xff\xfe' $'a\nb' ' ' '*'; mkdir $'\xe9' $'\xe9/\x01'""",
    "names like options": "touch -- -rf --",
    "long names": 'n=$(printf "n%.0s" {1..255}); mkdir $n; touch $n/$n',
    "symlinks": "ln -s / root; ln -s ../bystander d; ln -s absent x; mkdir a; ln -s ../.. a/up",
    "hard links": "touch a; ln a b; mkdir c; ln a c/d",
    "fifos and sockets": "mkfifo f; mkdir d; mkfifo d/f",
    "sticky and setgid directories": "mkdir a; chmod 3777 a; touch a/f",
}


@pytest.mark.parametrize("script", LEFT.values(), ids=LEFT.keys())
def test_it_is_removed(script, tmp_path, parent, owner):
    leave(script, tmp_path, owner)
    remove(parent, owner)


@needs_root
@pytest.mark.parametrize("script", LEFT.values(), ids=LEFT.keys())
def test_root_removes_what_another_left(script, tmp_path, parent):
    os.chown(tmp_path / "work", ORDINARY_UID, ORDINARY_UID)
    leave(script, tmp_path, ORDINARY_UID)
    remove(parent, os.getuid())


def test_a_socket_is_removed(tmp_path, parent):
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(".", os.O_RDONLY)
        os.chdir(tmp_path / "work")
        try:
            bound.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
        cleanup.remove_tree(parent, b"work")
    assert not (tmp_path / "work").exists()


def test_what_is_absent_is_removed_already(parent):
    cleanup.remove_tree(parent, b"absent")


def test_a_symlink_of_that_name_goes_and_its_target_stays(tmp_path, parent):
    (tmp_path / "link").symlink_to("bystander")
    cleanup.remove_tree(parent, b"link")
    assert not (tmp_path / "link").is_symlink()


def test_a_file_of_that_name_goes(tmp_path, parent):
    (tmp_path / "file").touch()
    cleanup.remove_tree(parent, b"file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", [b"", b".", b"..", b"work/..", b"/etc", b"a\0b"])
def test_what_is_not_one_name_is_refused(parent, name):
    with pytest.raises(ValueError, match="not one name"):
        cleanup.remove_tree(parent, name)


def deep_tree(start, depth, name="d"):
    """Makes ``depth`` directories one in the other, with a file in each."""
    fd = os.open(start, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_a_tree_deeper_than_recursion_and_descriptors_is_removed(tmp_path, parent):
    deep_tree(tmp_path / "work", 2000)

    def with_few_descriptors():
        # One is the duplicate of the parent, one is the level, one above or below, one scandir's.
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 4, free + 4))
        cleanup.remove_tree(parent, b"work")

    run_as(os.getuid(), with_few_descriptors)
    assert not (tmp_path / "work").exists()


def test_a_deep_tree_of_long_names_without_permissions_is_removed(tmp_path, parent, owner):
    def make():
        deep_tree(tmp_path / "work", 200, "n" * 255)

    run_as(os.getuid(), make)
    if owner != os.getuid():
        for directory, _, files, fd in os.fwalk(tmp_path / "work"):
            os.fchown(fd, owner, owner)
            os.fchmod(fd, 0o500)
            assert directory
            assert len(files) <= 1
    remove(parent, owner)


def test_memory_does_not_grow_with_the_number_of_files(tmp_path, parent):
    def peak(count):
        (tmp_path / "work").mkdir(exist_ok=True)
        fd = os.open(tmp_path / "work", os.O_RDONLY)
        for number in range(count):
            os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)
        tracemalloc.start()
        cleanup.remove_tree(parent, b"work")
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    peak(10)
    assert peak(10_000) < peak(200) + 20_000


def test_more_directories_than_are_remembered_are_removed(tmp_path, parent, monkeypatch):
    monkeypatch.setattr(cleanup, "MAX_REMEMBERED", 8)
    for number in range(50):
        (tmp_path / "work" / str(number) / "below" / "below").mkdir(parents=True)
        (tmp_path / "work" / str(number) / "other" / "below").mkdir(parents=True)
    cleanup.remove_tree(parent, b"work")
    assert not (tmp_path / "work").exists()


def test_no_more_names_than_promised_are_remembered(tmp_path, parent, monkeypatch):
    monkeypatch.setattr(cleanup, "MAX_REMEMBERED", 8)
    walk = cleanup._Walk(parent)
    most = 0
    step = walk._step

    def looked_at():
        nonlocal most
        step()
        assert walk._remembered == sum(len(level.pending) for level in walk._levels)
        most = max(most, walk._remembered - len(walk._levels))

    monkeypatch.setattr(walk, "_step", looked_at)
    for number in range(20):
        for below in range(12):
            (tmp_path / "work" / str(number) / str(below) / "x").mkdir(parents=True)
    assert walk.run(b"work") == []
    assert most <= 8


def left_behind(parent, name=b"work"):
    with pytest.raises(SandboxSetupError) as failed:
        cleanup.remove_tree(parent, name)
    return str(failed.value)


@needs_root
def test_what_another_owns_is_told_and_the_rest_goes(tmp_path, parent):
    os.chown(tmp_path / "work", ORDINARY_UID, ORDINARY_UID)
    leave("mkdir mine; touch mine/f g", tmp_path, ORDINARY_UID)
    (tmp_path / "work" / "roots").mkdir()
    (tmp_path / "work" / "roots" / "file").touch()

    def fails():
        with pytest.raises(SandboxSetupError, match=r"work/roots/file' \(Permission denied\)"):
            cleanup.remove_tree(parent, b"work")

    run_as(ORDINARY_UID, fails)
    assert [one.name for one in (tmp_path / "work").iterdir()] == ["roots"]


PROTECTED = {
    "an immutable file": "touch f; chattr +i f",
    "an append-only file": "touch f; chattr +a f",
    "an immutable directory": "mkdir d; touch d/f; chattr +i d",
    "an append-only directory": "mkdir -p d/e; touch d/e/f; chattr +a d/e d",
    "an empty immutable directory": "mkdir d; chattr +i d",
    "immutable files in an immutable directory without permissions": "mkdir d; touch d/f d/g;"
    "chattr +i d/f d/g; chmod 000 d; chattr +i d",
    "an immutable work directory": "touch f; mkdir d; chattr +i .",
}


@needs_root
@pytest.mark.parametrize("script", PROTECTED.values(), ids=PROTECTED.keys())
def test_protecting_attributes_do_not_protect(script, tmp_path, parent):
    probe = tmp_path / "probe"
    probe.touch()
    if subprocess.run(["chattr", "+i", probe], check=False, capture_output=True).returncode:
        pytest.skip("chattr cannot protect files here")
    subprocess.run(["chattr", "-i", probe], check=True)
    leave(script, tmp_path, os.getuid())
    try:
        remove(parent, os.getuid())
    finally:
        subprocess.run(["chattr", "-R", "-ia", tmp_path], check=False, capture_output=True)


REMOVE_WORK = """
import os, sys
from stockade.sandbox import cleanup
cleanup.remove_tree(os.open(sys.argv[1], os.O_RDONLY), b"work")
"""


@needs_root
@pytest.mark.parametrize("source", ["tmpfs", "bind"])
def test_a_mount_is_left_and_told_and_the_rest_goes(tmp_path, parent, source):
    mountpoint = tmp_path / "work" / "a" / "mounted"
    mountpoint.mkdir(parents=True)
    (tmp_path / "work" / "a" / "file").touch()
    (tmp_path / "work" / "b" / "c").mkdir(parents=True)
    # In a mount namespace of its own, so that nothing can stay mounted.
    command = "mount -t tmpfs none" if source == "tmpfs" else 'mount --bind "$0/bystander"'
    script = (
        f'{command} "$0/work/a/mounted" || exit 77; touch "$0/work/a/mounted/kept"; '
        'exec "$1" -c "$2" "$0"'
    )
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "--propagation",
            "private",
            "sh",
            "-c",
            script,
            tmp_path,
            sys.executable,
            REMOVE_WORK,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert done.returncode == 1
    assert "work/a/mounted' (a mount point)" in done.stderr
    assert sorted(one.name for one in (tmp_path / "work").rglob("*")) == ["a", "mounted"]
    if source == "bind":
        assert (tmp_path / "bystander" / "kept").exists()


def test_what_is_left_is_named_shortly_once(tmp_path, parent, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    deep_tree(tmp_path / "work", 50, "n" * 100)
    for number in range(30):
        (tmp_path / "work" / str(number)).touch()
    monkeypatch.setattr(os, "unlink", refuse)
    message = left_behind(parent)
    monkeypatch.undo()
    assert message.count("Input/output error") == 8
    assert message.endswith("and more")
    assert len(message) < 4000


def test_a_tree_in_which_nothing_can_be_removed_is_looked_at_once(tmp_path, parent, monkeypatch):
    scans = 0
    scandir = os.scandir

    def counted(path):
        nonlocal scans
        scans += 1
        return scandir(path)

    def refuse(*_arguments, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for number in range(200):
        (tmp_path / "work" / str(number) / "d").mkdir(parents=True)
        (tmp_path / "work" / str(number) / "d" / "file").touch()
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "scandir", counted)
    left_behind(parent)
    assert scans <= 401


def test_more_stuck_directories_than_are_remembered_end_the_walk(tmp_path, parent, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for number in range(50):
        (tmp_path / "work" / str(number)).mkdir()
        (tmp_path / "work" / str(number) / "file").touch()
    monkeypatch.setattr(cleanup, "MAX_REMEMBERED", 4)
    monkeypatch.setattr(os, "unlink", refuse)
    assert "work" in left_behind(parent)


def test_a_directory_moved_away_meanwhile_stops_the_walk(tmp_path, parent, monkeypatch):
    (tmp_path / "work" / "a" / "b").mkdir(parents=True)
    (tmp_path / "work" / "a" / "b" / "file").touch()
    enter = unprotect.open_within

    def moves_it_then(fd, name):
        below = enter(fd, name)
        if name == b"b":
            (tmp_path / "work" / "a" / "b").rename(tmp_path / "bystander" / "b")
        return below

    monkeypatch.setattr(cleanup, "open_within", moves_it_then)
    before = os.listdir("/proc/self/fd")
    assert "moved meanwhile" in left_behind(parent)
    assert os.listdir("/proc/self/fd") == before
    assert (tmp_path / "bystander" / "b").is_dir()


def test_a_directory_swapped_for_a_symlink_meanwhile_is_not_followed(tmp_path, parent, monkeypatch):
    (tmp_path / "work" / "a").mkdir()
    (tmp_path / "work" / "a" / "file").touch()
    enter = unprotect.open_within

    def swaps_it_first(fd, name):
        if name == b"a":
            (tmp_path / "work" / "a").rename(tmp_path / "work" / "z")
            (tmp_path / "work" / "a").symlink_to(tmp_path / "bystander")
        return enter(fd, name)

    monkeypatch.setattr(cleanup, "open_within", swaps_it_first)
    message = left_behind(parent)
    assert "work/a'" in message
    monkeypatch.undo()
    cleanup.remove_tree(parent, b"work")
