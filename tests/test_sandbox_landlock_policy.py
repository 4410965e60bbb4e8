"""The ruleset of ``sealed``, on this kernel and as far as it can be tried, as older ones see it."""

import subprocess
import sys
from pathlib import Path

import pytest
from perform_calls import make_ruleset

from stockade.platform import landlock
from stockade.sandbox import landlock_policy
from stockade.sandbox.errors import UnsupportedError
from stockade.sandbox.landlock_policy import Grants

ABI = landlock.abi()
# A kernel takes the rights of every ABI up to its own: each is what an older kernel would get.
ABIS = range(landlock_policy.MINIMUM_ABI, min(ABI, landlock.NEWEST_ABI) + 1)

PROLOGUE = """
import errno, fcntl, os, pty, socket, struct, sys, termios, tty
from stockade.platform import prctl, landlock
from stockade.sandbox.landlock_policy import Grants
from perform_calls import make_ruleset, restrict_self
abi, place = int(sys.argv[1]), sys.argv[2]
def error_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
def write(path):
    with open(path, "w") as file:
        file.write("x")
prctl.set_no_new_privs()
grants = Grants(read_only=["/"], read_write=[place + "/a", place + "/b"], devices=["/dev"])
restrict_self(make_ruleset(abi, grants))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("a", "a/deep", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "c" / "file").write_text("x")
    return tmp_path


def restricted(abi: int, place: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + script, str(abi), str(place)],
        check=False, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_landlock = pytest.mark.skipif(
    ABI < landlock_policy.MINIMUM_ABI, reason=f"Landlock ABI is {ABI}, the policy needs more"
)


@needs_landlock
@pytest.mark.parametrize("abi", ABIS)
def test_writable_places_are_writable_and_renames_cross_directories(abi, place):
    restricted(
        abi,
        place,
        """
write(place + "/a/deep/one")
os.rename(place + "/a/deep/one", place + "/a/one")
os.rename(place + "/a/one", place + "/b/one")
os.link(place + "/b/one", place + "/a/deep/two")
os.mkdir(place + "/a/directory")
os.rename(place + "/a/directory", place + "/b/directory")
os.symlink("one", place + "/b/link")
os.mkfifo(place + "/b/fifo")
os.truncate(place + "/b/one", 0)
write(place + "/b/one")
os.remove(place + "/b/one")
os.rmdir(place + "/b/directory")
with socket.socket(socket.AF_UNIX) as server:
    server.bind(place + "/a/socket")
""",
    )


@needs_landlock
@pytest.mark.parametrize("abi", ABIS)
def test_all_else_can_be_read_and_not_changed(abi, place):
    restricted(
        abi,
        place,
        """
open(place + "/c/file").close()
os.listdir("/")
os.system("true") == 0 or sys.exit(1)
assert error_of(write, place + "/c/file") == "EACCES"
assert error_of(write, place + "/c/new") == "EACCES"
assert error_of(os.remove, place + "/c/file") == "EACCES"
assert error_of(os.mkdir, place + "/c/new") == "EACCES"
write(place + "/a/file")
assert error_of(os.rename, place + "/a/file", place + "/c/stolen") in ("EACCES", "EXDEV")
assert error_of(os.rename, place + "/c/file", place + "/a/stolen") in ("EACCES", "EXDEV")
assert error_of(os.mknod, place + "/a/null", 0o20666, os.makedev(1, 3)) in ("EACCES", "EPERM")
if abi >= 3:
    assert error_of(os.truncate, place + "/c/file", 0) == "EACCES"
""",
    )


@needs_landlock
@pytest.mark.parametrize("abi", ABIS)
def test_devices_can_be_written_and_a_terminal_made_raw(abi, place):
    restricted(
        abi,
        place,
        """
write("/dev/null")
open("/dev/urandom", "rb").read(1)
os.system("echo x > /dev/null; cat < /dev/null") == 0 or sys.exit(1)
leader, follower = pty.openpty()
tty.setraw(follower)
fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
os.close(leader)
os.close(follower)
""",
    )


@pytest.mark.skipif(ABI < 5, reason=f"needs Landlock ABI 5, here is {ABI}")
def test_device_outside_the_granted_ones_takes_no_command(place):
    script = """
import errno, fcntl, os, sys, termios
from stockade.platform import prctl, landlock
from stockade.sandbox.landlock_policy import Grants
from perform_calls import make_ruleset, restrict_self
prctl.set_no_new_privs()
restrict_self(make_ruleset(landlock.abi(), Grants(["/"], [])))
fd = os.open("/dev/urandom", os.O_RDONLY)
try:
    fcntl.ioctl(fd, 0x80045200, bytes(4))  # RNDGETENTCNT
except OSError as error:
    assert error.errno == errno.EACCES, error
else:
    raise AssertionError
"""
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, cwd=Path(__file__).parent
    )


@needs_landlock
@pytest.mark.skipif(ABI < 6, reason=f"needs Landlock ABI 6, here is {ABI}")
def test_signals_reach_the_tasks_own_processes_only(place):
    restricted(
        ABI,
        place,
        """
import signal, subprocess
child = subprocess.Popen(["sleep", "60"])
assert error_of(os.kill, os.getppid(), 0) == "EPERM"
child.send_signal(signal.SIGTERM)
assert child.wait() == -signal.SIGTERM
""",
    )


@pytest.mark.parametrize("abi", range(landlock_policy.MINIMUM_ABI))
def test_abi_that_breaks_renames_is_not_used(abi, place):
    with pytest.raises(UnsupportedError, match="Linux 5"):
        make_ruleset(abi, Grants(["/"], []))
