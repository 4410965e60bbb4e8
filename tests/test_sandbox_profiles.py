"""What a slot of each profile is: what tasks see of the host, and of each other.

Two tasks side by side are run by one spawner, as the worker does it.
"""

from __future__ import annotations

import itertools
import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spawner_client import SpawnerClient, eventually

from stockade.platform import ipc, keyring
from stockade.sandbox.capabilities import probe
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.profiles import Feature, Profile, View

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: tasks with their own uids")
pytestmark = pytest.mark.skipif(
    Feature.NAMESPACES in probe().obstacles, reason="needs mounts and namespaces"
)

CONFINED = (Profile.PRIVATE, Profile.SEALED)
ALL = tuple(Profile)


class Tasks:
    """One spawner and the tasks that it runs."""

    def __init__(self, profile: Profile, view: View) -> None:
        self.client = SpawnerClient(profile=profile, view=view)
        self._seq = itertools.count(1)

    def start(self, script: str, limits: Limits | None = None, **more: Any) -> int:
        """Starts a script; its number."""
        seq = next(self._seq)
        self.client.start(seq, ["/bin/bash", "-c", script], limits, **more)
        return seq

    def end(self, seq: int) -> tuple[Outcome, str]:
        """Waits for it; its outcome and what it printed."""
        outcome = self.client.wait_ended(seq)
        return outcome, self.client.output(seq).decode(errors="replace")

    def run(self, script: str, limits: Limits | None = None, **more: Any) -> str:
        """What a script prints that must succeed."""
        outcome, printed = self.end(self.start(script, limits, **more))
        assert outcome.status is Status.SUCCESS, (outcome.reason, printed)
        return printed

    def beside(self, first: str, second: str) -> str:
        """What ``second`` prints while ``first`` runs, which must have printed ``ready``."""
        seq = self.start(f"{first}\nsleep 60 & wait")
        self.client.wait_started(seq)
        seen = ""
        while "ready" not in seen:
            seen += os.read(self.client.outputs[seq], 4096).decode() if self._readable(seq) else ""
        try:
            return self.run(second)
        finally:
            self.client.cancel(seq)
            self.client.wait_ended(seq)

    def _readable(self, seq: int) -> bool:
        return bool(select.select([self.client.outputs[seq]], [], [], 30)[0])


Make = Callable[..., Tasks]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of the host, for everybody, that lies where tasks see nothing (/tmp)."""
    path = Path(tempfile.mkdtemp(prefix="stockade-shown-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    """Makers of tasks; a slot that is being made while its places go would make them anew."""
    assert place.is_dir()
    made: list[Tasks] = []

    def make_tasks(profile: Profile, **view: Any) -> Tasks:
        made.append(Tasks(profile, View(**view)))
        return made[-1]

    yield make_tasks
    for tasks in made:
        tasks.client.close()


# ---- What is seen of the host ----


@pytest.mark.parametrize("profile", CONFINED)
def test_homes_and_run_are_empty(make: Make, profile: Profile) -> None:
    printed = make(profile).run("ls -A /home /root /run; echo $HOME; pwd")
    assert printed.split() == [
        "/home:", "/root:", "/run:", ".empty", ".nothing", ".shown", ".temporary", "task",
        "/run/task", "/run/task",
    ]  # fmt: skip


@pytest.mark.parametrize("profile", CONFINED)
def test_workers_own_directories_are_hidden(make: Make, profile: Profile) -> None:
    probing = make(profile)
    assert str(probing.client.home) not in probing.run("ls /tmp; cat /proc/self/mounts")


@pytest.mark.parametrize("profile", CONFINED)
def test_path_that_is_shown_read_write_can_be_written(
    make: Make, place: Path, profile: Profile
) -> None:
    tasks = make(profile, read_write_paths=(str(place),))
    tasks.run(f"echo kept > {place}/file")
    assert (place / "file").read_text() == "kept\n"


@pytest.mark.parametrize("profile", CONFINED)
def test_path_that_is_shown_read_only_cannot_be_written(
    make: Make, place: Path, profile: Profile
) -> None:
    (place / "file").write_text("seen\n")
    tasks = make(profile, read_only_paths=(str(place / "file"), str(place)))
    assert tasks.run(f"cat {place}/file; touch {place}/new 2>&- || echo refused").split() == [
        "seen", "refused",
    ]  # fmt: skip


@pytest.mark.parametrize("profile", CONFINED)
def test_longer_path_decides(make: Make, place: Path, profile: Profile) -> None:
    for name in ("open", "open/closed", "open/closed/open"):
        (place / name).mkdir(mode=0o777)
        (place / name).chmod(0o777)
        (place / name / "file").touch(0o666)
    tasks = make(
        profile,
        read_write_paths=(f"{place}/open", f"{place}/open/closed/open"),
        inaccessible_paths=(f"{place}/open/closed",),
    )
    printed = tasks.run(f"cd {place}; ls open open/closed open/closed/open; touch open/closed/x")
    assert printed.split("\n")[:3] == ["open:", "closed", "file"]


@pytest.mark.parametrize("profile", CONFINED)
def test_inaccessible_file_reads_as_nothing(make: Make, profile: Profile) -> None:
    tasks = make(profile, inaccessible_paths=("/etc/hostname", "/usr/share"))
    printed = tasks.run("cat /etc/hostname 2>&1; ls -A /usr/share; echo end")
    assert "denied" in printed
    assert printed.splitlines()[-1] == "end"
    assert len(printed.splitlines()) == 2


def test_path_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(SandboxSetupError, match=r"keep /tmp/stockade-gone, read-write: .*ENOENT"):
        SpawnerClient(view=View(read_write_paths=("/tmp/stockade-gone",)))


@pytest.mark.parametrize("profile", CONFINED)
def test_mounts_of_a_slot_do_not_reach_the_host(make: Make, profile: Profile) -> None:
    before = mounts_beside_tests()
    tasks = make(profile)
    tasks.run("true", Limits(workdir_max=MIB))
    assert mounts_beside_tests() == before
    assert str(tasks.client.home) not in Path("/proc/self/mounts").read_text()


def mounts_beside_tests() -> list[str]:
    """What is mounted, but in the temporary directories of tests, which may run beside this one."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if "/stockade-" not in line]


# ---- The quota of the work directory ----


@needs_root
@pytest.mark.parametrize("profile", ALL)
def test_work_directory_has_its_quota_and_is_gone_afterwards(make: Make, profile: Profile) -> None:
    tasks = make(profile)
    limits = Limits(workdir_max=4 * MIB, workdir_inodes_max=10)
    printed = tasks.run(
        "exec 2>&-; head -c 8M /dev/zero > big; stat -c %s big; rm big; "
        "for i in $(seq 20); do : > f$i || break; done; ls | wc -l",
        limits,
    )
    assert printed.split() == [str(4 * MIB), "10"]
    # The next one with a quota, and one without, find an empty directory.
    assert tasks.run("ls -A | wc -l", limits).strip() == "0"
    assert tasks.run("ls -A | wc -l").strip() == "0"


@needs_root
@pytest.mark.parametrize("profile", ALL)
def test_quota_of_nothing_is_not_taken_for_none(make: Make, profile: Profile) -> None:
    printed = make(profile).run(
        "exec 2>&-; head -c 1M /dev/zero > big; stat -c %s big", Limits(workdir_max=0)
    )
    assert int(printed) <= os.sysconf("SC_PAGE_SIZE")


@needs_root
@pytest.mark.parametrize("profile", ALL)
def test_files_that_come_with_a_task_lie_in_a_limited_work_directory(
    make: Make, profile: Profile
) -> None:
    tasks = make(profile)
    more = {"files": {"script": b"echo from a file\n"}}
    assert tasks.run("bash ./script; ls", Limits(workdir_max=MIB), **more).splitlines() == [
        "from a file", "script",
    ]  # fmt: skip


def test_work_directory_larger_than_half_of_memory_is_not_pretended(make: Make) -> None:
    tasks = make(Profile.PROCESS)
    seq = tasks.start("true", Limits(memory_max=64 * MIB, workdir_max=40 * MIB))
    assert "workdir_max" in tasks.end(seq)[0].degraded


# ---- Two tasks side by side ----

PTRACE = """python3 -c '
import ctypes
print(ctypes.CDLL(None).ptrace(16, {pid}, 0, 0))'"""


@needs_root
@pytest.mark.parametrize("profile", ALL)
def test_tasks_cannot_signal_trace_or_look_at_each_other(make: Make, profile: Profile) -> None:
    tasks = make(profile)
    victim = tasks.start("echo secret > note; SECRET=x exec sleep 60")
    pid = tasks.client.wait_started(victim)
    assert pid > 1
    seq = tasks.start(
        f"kill -9 {pid} && echo BAD; {PTRACE.format(pid=pid)}; cat /proc/{pid}/environ && echo BAD;"
        f"ls /proc/{pid}/root && echo BAD; ls /proc/{pid}/cwd/ && echo BAD; kill -9 -1"
    )
    _, printed = tasks.end(seq)
    assert "BAD" not in printed
    assert "-1" in printed.split()
    assert os.path.exists(f"/proc/{pid}")
    tasks.client.cancel(victim)
    assert tasks.end(victim)[0].status is Status.CANCELLED


@needs_root
@pytest.mark.parametrize("profile", CONFINED)
def test_temporary_files_and_shared_memory_are_not_shared(make: Make, profile: Profile) -> None:
    if shutil.which("ipcmk") is None:
        pytest.skip("needs ipcmk")
    printed = make(profile).beside(
        "touch /tmp/a /var/tmp/b /dev/shm/c; ipcmk -M 100 -p 0666 >/dev/null; echo ready",
        "ls -A /tmp /var/tmp /dev/shm; ipcs -m | grep -c 0x || true",
    )
    assert printed.split() == ["/dev/shm:", "/tmp:", "/var/tmp:", "0"]


ABSTRACT = """exec python3 -c '
import socket, time
s = socket.socket(socket.AF_UNIX); s.bind("\\0stockade-test"); s.listen()
print("ready", flush=True); time.sleep(60)' &"""
CONNECT = """python3 -c '
import socket
s = socket.socket(socket.AF_UNIX)
try: s.connect("\\0stockade-test"); print("CONNECTED")
except OSError as error: print(error.errno)'"""


def test_sealed_tasks_do_not_share_abstract_sockets(make: Make) -> None:
    assert "CONNECTED" not in make(Profile.SEALED).beside(ABSTRACT, CONNECT)


def test_private_tasks_with_a_network_of_their_own_do_not_share_abstract_sockets(
    make: Make,
) -> None:
    tasks = make(Profile.PRIVATE, private_network=True)
    assert "CONNECTED" not in tasks.beside(ABSTRACT, CONNECT)


def test_private_network_has_loopback_and_nothing_else(make: Make) -> None:
    tasks = make(Profile.PRIVATE, private_network=True)
    assert tasks.run("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]


def test_sealed_task_cannot_reach_a_listener_of_the_host(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        printed = make(Profile.SEALED).run(f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&1 || echo no")
    assert printed.splitlines()[-1] == "no"


# ---- A leftover of one task never meets the next ----


@needs_root
def test_what_a_task_leaves_of_its_uid_is_removed_before_the_uid_serves_again(make: Make) -> None:
    tasks = make(Profile.PROCESS)
    uid = int(
        tasks.run(
            "id -u; ipcmk -M 100 >/dev/null; ipcmk -S 1 >/dev/null; ipcmk -Q >/dev/null; "
            "echo x > /dev/shm/stockade-left-$(id -u); mkdir -p /tmp/stockade-left-$(id -u)/deep; "
            "keyctl add user stockade-left secret @u >/dev/null 2>&1 || true"
        ).split()[0]
    )
    eventually(lambda: not ipc.objects_of(uid))
    for directory in ("/dev/shm", "/tmp"):
        eventually(lambda path=directory: not Path(path, f"stockade-left-{uid}").exists())


ADD_KEY = """python3 -c '
import ctypes
libc = ctypes.CDLL(None)
print(libc.syscall({add_key}, b"user", b"left", b"secret", 6, -4) > 0)'"""
FIND_KEY = """python3 -c '
import ctypes
libc = ctypes.CDLL(None)
print(libc.syscall({keyctl}, 10, -4, b"user", b"left", 0) > 0)'"""


@needs_root
@pytest.mark.parametrize("profile", [Profile.PROCESS, Profile.PRIVATE])
def test_key_of_one_task_is_not_found_by_the_next_with_its_uid(
    make: Make, profile: Profile
) -> None:
    numbers = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine)
    if numbers is None:
        pytest.skip("needs the numbers of add_key and keyctl")
    tasks = make(profile)
    printed = tasks.run(f"id -u; {ADD_KEY.format(add_key=numbers[0])}").split()
    if printed[1] != "True":
        pytest.skip("needs a kernel with keyrings")
    uid = int(printed[0])
    assert uid in keyring.owners()
    # A task of that very uid: all others of the range come first, so it is asked for by hand.
    eventually(lambda: not _has_key(uid, numbers[1]))


def _has_key(uid: int, keyctl: int) -> bool:
    """Whether a process of the uid finds the key, from outside."""
    found = subprocess.run(
        ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "/bin/bash", "-c",
         FIND_KEY.format(keyctl=keyctl)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.split() == ["True"]


# ---- What tasks need works inside ----

PROGRAMS = {
    "bash": "cat <(echo substituted)",
    "python3": "python3 -c 'import multiprocessing as m; print(m.Lock() is not None)'",
    "node": "node -e 'console.log([1,2].map(x => x + 1))'",
    "java": "java -version 2>&1",
    "git": "git init -q r && cd r && git -c user.name=a -c user.email=b commit -q --allow-empty "
    "-m m && git log --oneline",
    "curl": "curl --version",
    "gcc": "printf 'int main(){return 0;}' > a.c && gcc -o a a.c && ./a && echo built",
    "script": "script -qc 'tty' /dev/null",
}


@pytest.mark.parametrize("profile", CONFINED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_works_inside(make: Make, profile: Profile, program: str) -> None:
    path = "/usr/local/bin:/usr/bin:/bin"
    found = shutil.which(program, path=path)
    if found is None or os.path.realpath(found).startswith("/root/"):
        pytest.skip(f"needs {program}, outside of homes")
    environment = (f"PATH={path}",)
    limits = Limits(memory_max=512 * MIB)
    assert make(profile).run(PROGRAMS[program], limits, environment=environment)


@pytest.mark.parametrize("profile", ALL)
def test_server_on_localhost_works_inside(make: Make, profile: Profile) -> None:
    script = """python3 - <<'E'
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b"served")
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read().decode())
E"""
    assert make(profile).run(script).strip() == "served"


@pytest.mark.parametrize("profile", CONFINED)
def test_true_status_of_the_task_is_handed_on(make: Make, profile: Profile) -> None:
    tasks = make(profile)
    outcome, _ = tasks.end(tasks.start("exit 137"))
    assert (outcome.error_code, outcome.exit_code) == (ErrorCode.EXECUTE_FAILED, 137)
    outcome, _ = tasks.end(tasks.start("kill -KILL $$"))
    assert (outcome.error_code, outcome.signal) == (ErrorCode.SIGNALED, "SIGKILL")


@pytest.mark.parametrize("profile", CONFINED)
def test_sigterm_reaches_the_task_in_its_pid_namespace(make: Make, profile: Profile) -> None:
    tasks = make(profile)
    seq = tasks.start("trap 'echo asked; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    tasks.client.wait_started(seq)
    eventually(lambda: os.read(tasks.client.outputs[seq], 100) if tasks._readable(seq) else b"")
    tasks.client.cancel(seq)
    outcome, printed = tasks.end(seq)
    assert outcome.status is Status.CANCELLED
    assert "asked" in printed
