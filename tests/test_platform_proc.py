"""/proc as we read it, compared with psutil and with what the processes themselves say."""

import os
import select
import subprocess
import sys
import time

import psutil
import pytest

from stockade.platform import pidfd, proc

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Talker:
    """A Python child that prints lines and lives until its stdin closes."""

    def __init__(self, script: str, **options) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert select.select([self.process.stdout], [], [], 20)[0], "said nothing"
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()


def until(true, *, seconds=20):
    """Looks again and again, for what has no event to wait on."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "did not come true"
        select.select([], [], [], 0.005)


def test_boot_id_is_the_kernels():
    said = subprocess.check_output(["cat", "/proc/sys/kernel/random/boot_id"], text=True)
    assert proc.boot_id() == said.strip()
    assert len(proc.boot_id()) == 36


def test_start_time_agrees_with_psutil():
    ticks = proc.start_time_ticks(os.getpid())
    assert ticks is not None
    started = psutil.boot_time() + ticks / os.sysconf("SC_CLK_TCK")
    assert abs(started - psutil.Process().create_time()) < 1.5


def test_a_process_that_is_gone_is_none():
    child = subprocess.Popen(["true"])
    child.wait()
    assert proc.process(child.pid) is None
    assert proc.start_time_ticks(child.pid) is None
    assert proc.memory_bytes([child.pid]) == 0


@pytest.mark.parametrize("name", [") R 1 (", "a b) S 1 1", "\\n) Z 1\\n", "((("])
def test_a_name_that_imitates_the_format_misleads_nobody(name):
    script = f"""
import sys
open("/proc/self/comm", "w").write("{name}")
print("ready", flush=True)
sys.stdin.read()
"""
    with Talker(script, start_new_session=True) as child:
        child.line()
        found = proc.process(child.pid)
        assert found is not None
        assert (found.parent, found.group, found.session) == (os.getpid(), child.pid, child.pid)
        assert found.is_alive


def test_descendants_and_session_agree_with_psutil():
    with Talker(
        """
import subprocess, sys
child = subprocess.Popen(["sh", "-c", "sleep 60 & setsid sleep 60 & wait"])
print("ready", flush=True)
sys.stdin.read()
child.kill()
""",
        start_new_session=True,
    ) as child:
        child.line()
        until(lambda: len(proc.descendants(child.pid)) == 3)
        found = proc.descendants(child.pid)
        try:
            theirs = {one.pid for one in psutil.Process(child.pid).children(recursive=True)}
            assert set(found) == theirs
            assert proc.children(child.pid) == [found[0]]
            until(lambda: len(proc.processes_of_session(child.pid)) == 3)
            apart = set(found) - set(proc.processes_of_session(child.pid))
            assert len(apart) == 1
            assert os.getsid(apart.pop()) != child.pid
        finally:
            for pid in found[1:]:
                pidfd.checked_kill(pid, 9)


def test_what_only_waits_to_be_reaped_is_not_told():
    child = subprocess.Popen(["true"], start_new_session=True)
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        found = proc.process(child.pid)
        assert found is not None
        assert not found.is_alive
        assert child.pid not in proc.children(os.getpid())
        assert proc.processes_of_session(child.pid) == []
    finally:
        child.wait()


FIRST_THREAD_ENDS = """
import ctypes, os, threading
block = bytearray(50 << 20)
for offset in range(0, len(block), 4096):
    block[offset] = 1
def body():
    while open("/proc/self/stat").read().rsplit(")", 1)[1].split()[0] != "Z":
        pass
    os.write(1, b"ready\\n")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=body).start()
# exit(2) of the first thread alone, without the GIL; the other one goes on.
ctypes.CDLL(None).syscall({"x86_64": 60}.get(os.uname().machine, 93), 0)
"""


def test_a_process_whose_first_thread_ended_is_not_hidden():
    with Talker(FIRST_THREAD_ENDS, start_new_session=True) as child:
        child.line()
        found = proc.process(child.pid)
        assert found is not None
        assert (found.state, found.is_alive) == ("Z", True)
        assert proc.processes_of_session(child.pid) == [child.pid]
        assert proc.memory_bytes([child.pid]) > 50 << 20


@needs_root
def test_a_process_that_forbids_to_be_looked_at_is_found_by_its_uid():
    uid = 1_900_000_000 + os.getpid()
    with Talker(
        f"""
import os, sys
os.setresuid({uid}, {uid}, {uid})
print("ready", flush=True)
sys.stdin.read()
"""
    ) as child:
        child.line()
        assert os.stat(f"/proc/{child.pid}/environ").st_uid == 0
        assert proc.processes_of_uid(uid) == [child.pid]
    assert proc.processes_of_uid(uid) == []


@needs_root
@pytest.mark.parametrize("uids", ["{uid}, 0, 0", "0, {uid}, 0", "0, 0, {uid}"])
def test_any_of_a_process_uids_counts(uids):
    uid = 1_900_000_000 + os.getpid()
    with Talker(
        f"import os, sys; os.setresuid({uids.format(uid=uid)}); "
        'print("ready", flush=True); sys.stdin.read()'
    ) as child:
        child.line()
        assert proc.processes_of_uid(uid) == [child.pid]


TOUCH = """
import os, sys
block = bytearray(60 << 20)
for offset in range(0, len(block), 4096):
    block[offset] = 1
"""


def test_memory_is_what_the_process_touched():
    with Talker(TOUCH + 'print("ready", flush=True); sys.stdin.read()') as child:
        child.line()
        held = proc.memory_bytes([child.pid])
        assert 60 << 20 < held < 100 << 20
        assert abs(held - psutil.Process(child.pid).memory_full_info().pss) < 1 << 20


def test_memory_that_forks_share_counts_once():
    with Talker(
        TOUCH
        + """
pids = [os.getpid()]
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        sys.stdin.buffer.raw.read()
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.buffer.raw.read()
for pid in pids[1:]:
    os.waitpid(pid, 0)
"""
    ) as child:
        pids = [int(word) for word in child.line().split()]
        assert len(pids) == 5
        assert 60 << 20 < proc.memory_bytes(pids) < 110 << 20


def test_memory_of_a_vfork_child_counts_once():
    # Until it execs, a vfork child has its parent's memory. One that stays so: clone(CLONE_VM) of
    # libc's own pause(), on a stack of its own.
    with Talker(
        TOUCH
        + """
import ctypes, signal
libc = ctypes.PyDLL(None)
CLONE_VM = 0x100
stack = ctypes.create_string_buffer(1 << 16)
top = ctypes.addressof(stack) + (1 << 16) - 64 & ~63
libc.clone.restype = ctypes.c_int
pid = libc.clone(libc.pause, ctypes.c_void_p(top), CLONE_VM | signal.SIGCHLD, None)
assert pid > 0
print(pid, flush=True)
sys.stdin.buffer.raw.read()
os.kill(pid, 9)
os.waitpid(pid, 0)
"""
    ) as child:
        twin = int(child.line())
        once = proc.memory_bytes([child.pid])
        assert 60 << 20 < once < 100 << 20
        assert proc.memory_bytes([child.pid, twin]) == pytest.approx(once, rel=0.05)


@needs_root
def test_where_we_may_not_look_the_resident_set_counts():
    with Talker(TOUCH + 'print("ready", flush=True); sys.stdin.read()') as child:
        child.line()
        script = (
            "import os, sys; from stockade.platform import proc;"
            "os.setresuid(1900000001, 1900000001, 1900000001);"
            "print(proc.memory_bytes([int(sys.argv[1])]))"
        )
        said = subprocess.check_output(
            [sys.executable, "-c", script, str(child.pid)], text=True, timeout=30
        )
        assert int(said) == pytest.approx(psutil.Process(child.pid).memory_info().rss, rel=0.05)


def test_readers_survive_processes_that_come_and_go():
    storm = subprocess.Popen(["sh", "-c", "while :; do /bin/true & /bin/true; done"])
    try:
        for _ in range(30):
            proc.descendants(storm.pid)
            proc.processes_of_uid(os.getuid())
            proc.memory_bytes(proc.descendants(storm.pid))
    finally:
        storm.kill()
        storm.wait()
