"""BenchExec's runexec and Docker as ways to run a program."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accounting import reap_strays
from ways import Argv, UnavailableError, Way, plain_output, posix_spawn
from worker import PREFIX, STATE_ON


@contextlib.contextmanager
def runexec() -> Iterator[Way]:
    """As a library in this process: the command line adds Python's own start each time."""
    try:
        from benchexec.runexecutor import RunExecutor
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error
    logging.getLogger().setLevel(logging.ERROR)
    place = tempfile.mkdtemp(prefix=PREFIX, dir=STATE_ON)
    printed = f"{place}/output"

    def execute(argv: Argv) -> None:
        done = executor.execute_run(list(argv), printed, workingDir="/", write_header=False)
        status: Any = done.get("exitcode")
        assert getattr(status, "value", None) == 0, done

    def run(argv: Argv) -> float:
        began = time.perf_counter()
        execute(argv)
        return time.perf_counter() - began

    def output(argv: Argv) -> bytes:
        execute(argv)
        return Path(printed).read_bytes()

    try:
        try:
            # Without its overlay of the whole file system, which no other way here makes.
            modes = {"/": "read-only", "/run": "hidden", "/tmp": "hidden", "/home": "hidden"}
            executor = RunExecutor(dir_modes=modes)
            run(("/bin/true",))
        except (SystemExit, OSError, AssertionError) as error:
            raise UnavailableError(f"does not run here: {error}") from error
        yield Way(run, output, every=3)
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def docker(stamp: str | None) -> Iterator[Way]:
    """``docker run`` on an engine of our own, as the tests start it, with a small image.

    Args:
        stamp: a program that the image shall hold too.
    """
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from engine_lab import IMAGE, Docker, EngineFailedError

    if reason := Docker.why_not():
        raise UnavailableError(reason)
    engine = Docker()
    try:
        try:
            engine.start()
            engine.make_image()
        except EngineFailedError as error:
            raise UnavailableError(str(error)) from error
        mount = [] if stamp is None else ["--volume", f"{os.path.dirname(stamp)}:/stamp:ro"]
        start = ["docker", "--host", f"unix://{engine.socket}", "run", "--rm", "--network=none"]

        def command(argv: Argv) -> list[str]:
            if argv[0] == stamp:
                return [*start, *mount, IMAGE, f"/stamp/{os.path.basename(stamp)}"]
            return [*start, IMAGE, *argv]

        yield Way(
            lambda argv: posix_spawn(command(argv)),
            lambda argv: plain_output(command(argv)),
            every=10,
            shell="/bin/sh",
        )
    finally:
        engine.close()
        reap_strays()
