"""What the supervisor cannot do any more, tried by a process that has confined itself so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from worker_process import WorkerProcess

TRY = """
import ctypes, errno, os, socket, subprocess
from stockade.platform import namespaces, mounts, clone
from stockade.platform.errors import SyscallError
from stockade.sandbox import supervisor_confinement

supervisor_confinement.confine()

def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == errno.EPERM, error
    else:
        raise SystemExit(f"{call} went through")

refused(namespaces.unshare, clone.CLONE_NEWNS)
refused(namespaces.unshare, clone.CLONE_NEWUSER)
refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)
refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 9)
refused(os.chroot, "/")
# What it lives by.
socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4).close()
socket.create_server(("127.0.0.1", 0)).close()
os.memfd_create("x")
pid = os.posix_spawn("/bin/true", ["true"], {})
assert os.waitpid(pid, 0)[1] == 0
status = open("/proc/self/status").read()
assert "NoNewPrivs:\\t1" in status and "Seccomp:\\t2" in status
"""


def test_namespaces_raw_sockets_and_roots_are_out_of_reach_and_the_rest_works() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TRY], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def field(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (value,) = (line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:"))
    return value


def test_supervisor_is_confined_and_its_spawner_is_not(worker: WorkerProcess) -> None:
    assert worker.process is not None
    supervisor, spawner = worker.process.pid, worker.active_spawner()
    assert (field(supervisor, "NoNewPrivs"), field(supervisor, "Seccomp")) == ("1", "2")
    ours = field(os.getpid(), "NoNewPrivs"), field(os.getpid(), "Seccomp")
    assert (field(spawner, "NoNewPrivs"), field(spawner, "Seccomp")) == ours
