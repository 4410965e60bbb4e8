"""The agent: runs in a lab host as root and does what the lab says over a virtio port.

It installs the checkout that came in the same parcel, says hello, and then runs one command after
the other, each in a systemd scope of its own as a login would have it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Final, Protocol

PARCEL: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PARCEL))

from lab.channel import Kind, frame, json_frame, read_frame  # noqa: E402

PORT: Final = "/dev/virtio-ports/stockade-lab"
CHECKOUT: Final = PARCEL / "stockade"
VENV: Final = Path("/opt/stockade")
CHUNK_BYTES: Final = 65536
SCOPE: Final = ["systemd-run", "--scope", "--quiet", "--collect", "-p", "TasksMax=infinity", "--"]


class Port(Protocol):
    """The stream to the lab, unbuffered."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: bytes, /) -> int: ...


def send(port: Port, data: bytes) -> None:
    """Writes all of ``data``; the port takes as much at once as it has room for."""
    view = memoryview(data)
    while view:
        view = view[port.write(bytes(view)) :]


def install(wheel: Path, venv: Path = VENV) -> None:
    """Installs the checkout's wheel, in place of an earlier one.

    Unpacked rather than given to pip: in emulation that takes a second and not half a minute, and
    the wheel, built for the machine's Python, holds nothing that depends on its version.
    """
    (packages,) = venv.glob("lib/python3*/site-packages")
    for earlier in packages.glob("stockade*"):
        shutil.rmtree(earlier)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            path = archive.extract(entry, packages)
            # Python's zipfile does not keep modes, and the launcher is a program.
            os.chmod(path, (entry.external_attr >> 16) & 0o777 or 0o644)
    for found in importlib.metadata.distributions(name="stockade", path=[str(packages)]):
        for script in found.entry_points.select(group="console_scripts"):
            path = venv / "bin" / script.name
            path.write_text(
                f"#!{venv}/bin/python\nimport sys\nfrom {script.module} import {script.attr}\n"
                f"sys.exit({script.attr}())\n"
            )
            path.chmod(0o755)


def run(port: Port, job: dict[str, Any], prefix: list[str]) -> None:
    """Runs one command and sends its output as it comes, then its files, then its status."""
    try:
        process = subprocess.Popen(
            [*prefix, *job["argv"]],
            cwd=job["directory"],
            env={**os.environ, **job["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            preexec_fn=_ordinary_oom_score,  # noqa: PLW1509 - no other thread writes here
        )
    except OSError as error:
        send(port, frame(Kind.OUTPUT, f"cannot run {job['argv'][0]}: {error}\n".encode()))
        send(port, json_frame(Kind.EXIT, {"status": 127}))
        return
    assert process.stdout is not None
    # Until every writer is gone: what the command leaves behind may still print.
    while data := process.stdout.read(CHUNK_BYTES):
        send(port, frame(Kind.OUTPUT, data))
    status = process.wait()
    process.stdout.close()
    for path in job["files"]:
        if os.path.isfile(path):
            content = Path(path).read_bytes()
            send(port, frame(Kind.FILE, os.fsencode(path) + b"\0" + content))
    send(port, json_frame(Kind.EXIT, {"status": status}))


def _ordinary_oom_score() -> None:
    # The agent itself is exempt from the guest's OOM killer, and must not pass that on.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("0")


def serve(port: Port, prefix: list[str]) -> bool:
    """Does what comes until the lab hangs up; whether it asked to switch off."""
    while True:
        received = read_frame(lambda size: port.read(size) or b"")
        if received is None:
            return False
        kind, payload = received
        if kind is Kind.RUN:
            run(port, json.loads(payload), prefix)
        elif kind is Kind.POWEROFF:
            return True


def main() -> None:
    booted = float(Path("/proc/uptime").read_text().split()[0])
    started = time.monotonic()
    with open(PORT, "r+b", buffering=0) as port:
        checkout = Path("/srv/stockade")
        shutil.rmtree(checkout, ignore_errors=True)
        CHECKOUT.rename(checkout)
        for beside in (PARCEL / "beside").iterdir():
            target = Path("/srv") / beside.name
            shutil.rmtree(target, ignore_errors=True)
            beside.rename(target)
        try:
            install(next((PARCEL / "wheel").iterdir()))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            send(port, frame(Kind.FAILED, str(error).encode()))
        else:
            hello = {
                "kernel": platform.release(),
                "booted_s": booted,
                "installed_s": time.monotonic() - started,
            }
            send(port, json_frame(Kind.HELLO, hello))
        if serve(port, SCOPE):
            subprocess.run(["systemctl", "poweroff"], check=False)


if __name__ == "__main__":
    main()
