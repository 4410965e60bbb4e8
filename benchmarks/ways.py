"""Ways to run a program that need nothing but this host: each gives seconds from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from worker import PREFIX

from stockade.platform import cgroup
from stockade.supervisor.cli.run import DEFAULT_LANG, DEFAULT_PATH
from stockade.supervisor.task_types.shell import shell_environment

Argv = Sequence[str]

# What a worker's shell tasks get, for all: LANG alone makes the `id` of /etc/profile read locales.
ENVIRONMENT: Final = {
    **shell_environment(path=DEFAULT_PATH, lang=DEFAULT_LANG),
    "HOME": "/nonexistent",
}
STAMP_SOURCE: Final = """
#include <stdio.h>
#include <time.h>
int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return printf("%lld\\n", now.tv_sec * 1000000000LL + now.tv_nsec) < 0;
}
"""
# Seen by every sandbox here, which homes and directories for temporary files are not.
VISIBLE: Final = "/var/lib"


class UnavailableError(Exception):
    """A way that this host does not have, with the reason."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to run a program.

    Attributes:
        run: seconds from start to exit.
        output: what a program prints on its standard output.
        every: it takes part in every so manieth round only, since it takes long.
        shell: what it has for ``bash -lc``.
    """

    run: Callable[[Argv], float]
    output: Callable[[Argv], bytes]
    every: int = 1
    shell: str = "/bin/bash"


def posix_spawn(argv: Argv) -> float:
    """The bare way, which everything is compared with."""
    began = time.perf_counter()
    pid = os.posix_spawnp(argv[0], argv, ENVIRONMENT)
    _, status = os.waitpid(pid, 0)
    took = time.perf_counter() - began
    assert status == 0, f"{argv} ended with {status}"
    return took


def plain_output(argv: Argv) -> bytes:
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    pid = os.posix_spawnp(argv[0], argv, ENVIRONMENT, file_actions=actions)
    os.close(write)
    text = os.read(read, 65536)
    os.close(read)
    os.waitpid(pid, 0)
    return text


def subprocess_run(argv: Argv) -> float:
    began = time.perf_counter()
    subprocess.run(argv, env=ENVIRONMENT, check=True)
    return time.perf_counter() - began


def subprocess_output(argv: Argv) -> bytes:
    return subprocess.run(argv, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE).stdout


def preexec(argv: Argv) -> float:
    """Python code between fork and exec, as a worker does that sets limits there."""
    began = time.perf_counter()
    subprocess.run(argv, env=ENVIRONMENT, check=True, preexec_fn=os.setsid)
    return time.perf_counter() - began


def preexec_output(argv: Argv) -> bytes:
    return subprocess.run(
        argv, env=ENVIRONMENT, check=True, preexec_fn=os.setsid, stdout=subprocess.PIPE
    ).stdout


@contextlib.contextmanager
def uvloop_subprocess() -> Iterator[Way]:
    """asyncio's subprocess in one uvloop that lives on."""
    try:
        import uvloop
    except ImportError as error:
        raise UnavailableError(str(error)) from error
    loop = uvloop.new_event_loop()

    async def run(argv: Argv) -> float:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*argv, env=ENVIRONMENT)
        status = await process.wait()
        assert status == 0, f"{argv} ended with {status}"
        return time.perf_counter() - began

    async def output(argv: Argv) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *argv, env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0]

    try:
        yield Way(
            lambda argv: loop.run_until_complete(run(argv)),
            lambda argv: loop.run_until_complete(output(argv)),
        )
    finally:
        loop.close()


BUBBLEWRAP: Final = (
    "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1",
    "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs",
    "/var/tmp", "--tmpfs", "/run", "--tmpfs", "/home", "--tmpfs", "/root", "--cap-drop", "ALL",
)  # fmt: skip


@contextlib.contextmanager
def bubblewrap() -> Iterator[Way]:
    """With the isolation of ``sealed`` but for its seccomp filter, Landlock and cgroup."""
    if shutil.which("bwrap") is None:
        raise UnavailableError("no bwrap: apt install bubblewrap")
    way = Way(
        lambda argv: posix_spawn((*BUBBLEWRAP, *argv)),
        lambda argv: plain_output((*BUBBLEWRAP, *argv)),
    )
    try:
        way.run(("/bin/true",))
    except AssertionError as error:
        raise UnavailableError("bwrap cannot make its namespaces here") from error
    yield way


@contextlib.contextmanager
def systemd_run() -> Iterator[Way]:
    """A transient service of the running systemd, waited for."""
    if not os.path.isdir("/run/systemd/system"):
        raise UnavailableError("systemd does not run here")
    command = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--")
    yield Way(
        lambda argv: posix_spawn((*command, *argv)),
        lambda argv: plain_output((*command, *argv)),
        every=5,
    )


@contextlib.contextmanager
def hops() -> Iterator[Way]:
    """The processes and messages of a warm start in C, without all else: see hops.c."""
    mount = cgroup.find_mount()
    if mount is None or os.geteuid() != 0:
        raise UnavailableError("needs root, and cgroup v2")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    printed, stdout = os.pipe()
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=VISIBLE) as place:
        program = Path(place) / "hops"
        compile_c(Path(__file__).with_name("hops.c"), program)
        arguments = (str(mount / f"{PREFIX}hops"), f"{place}/record", str(theirs.fileno()))
        process = subprocess.Popen(
            (str(program), *arguments), pass_fds=(theirs.fileno(),), stdout=stdout
        )
        theirs.close()
        os.close(stdout)

        def run(argv: Argv) -> float:
            began = time.perf_counter()
            ours.send(b"".join(word.encode() + b"\0" for word in argv))
            status = ours.recv(4)
            took = time.perf_counter() - began
            assert status == bytes(4), f"hops: {argv} ended with {status!r}"
            return took

        def output(argv: Argv) -> bytes:
            run(argv)
            return os.read(printed, 65536)

        try:
            yield Way(run, output)
        finally:
            ours.close()
            process.wait()
            os.close(printed)


def compile_c(source: Path, program: Path, *flags: str) -> None:
    """Makes a program.

    Raises:
        UnavailableError: there is no compiler.
    """
    if shutil.which("gcc") is None:
        raise UnavailableError("no gcc: apt install gcc libc6-dev")
    subprocess.run(["gcc", "-O2", *flags, "-o", str(program), str(source)], check=True)


@contextlib.contextmanager
def stamp() -> Iterator[str]:
    """A small static program that prints the monotonic time of its first instruction, in ns."""
    try:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=VISIBLE))
    except PermissionError as error:
        raise UnavailableError(f"needs root to write {VISIBLE}, which sandboxes show") from error
    try:
        place.chmod(0o755)
        (place / "stamp.c").write_text(STAMP_SOURCE)
        compile_c(place / "stamp.c", place / "stamp", "-static")
        yield str(place / "stamp")
    finally:
        shutil.rmtree(place)
