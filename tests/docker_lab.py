"""A Docker engine of the tests' own: its socket, its data, one small image; nothing of the host's.

``dockerd`` of Debian's docker.io runs as root in most places, without touching the host's network:
no bridge, no iptables. What the image holds is busybox, imported from a tree.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

IMAGE = "stockade-test:1"
_APPLETS = (
    "sh", "cat", "echo", "env", "false", "head", "id", "kill", "ls", "mkdir", "printenv", "ps",
    "pwd", "seq", "sleep", "stat", "tail", "touch", "tr", "true", "yes", "dd", "wc",
)  # fmt: skip
_START_S = 60.0


def why_not() -> str:
    """Why no engine can be run here; empty when it is worth a try."""
    if os.geteuid() != 0:
        return "needs root: dockerd"
    missing = [name for name in ("dockerd", "docker", "busybox") if shutil.which(name) is None]
    return f"needs {', '.join(missing)}: apt install docker.io busybox-static" if missing else ""


class EngineFailedError(Exception):
    """The engine cannot run here, with its own words."""


class Docker:
    """The engine, running."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="stockade-docker-", dir="/tmp"))
        self.socket = self.place / "docker.sock"
        self._log = self.place / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and returns when it answers.

        Raises:
            EngineFailedError: it does not.
        """
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                ["dockerd", "--host", f"unix://{self.socket}", "--data-root",
                 str(self.place / "data"), "--exec-root", str(self.place / "exec"),
                 "--pidfile", str(self.place / "pid"), "--storage-driver=vfs", "--iptables=false",
                 "--ip6tables=false", "--bridge=none", "--ip-forward=false", "--ip-masq=false",
                 "--live-restore"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + _START_S
        while self.docker("version").returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                text = self._log.read_text()[-600:]
                self.stop()
                raise EngineFailedError(f"dockerd does not run here: {text}")
            time.sleep(0.05)

    def make_image(self) -> None:
        tree = self.place / "tree"
        (tree / "bin").mkdir(parents=True)
        for name in ("tmp", "etc", "data"):
            (tree / name).mkdir()
        (tree / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, tree / "bin/busybox")
        for name in _APPLETS:
            (tree / "bin" / name).symlink_to("busybox")
        archive = subprocess.run(
            ["tar", "-C", str(tree), "-c", "."], check=True, capture_output=True
        ).stdout
        self.docker("import", "-", IMAGE, stdin=archive).check_returncode()

    def docker(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Any client's command: for looking at, and disturbing, what Stockade does."""
        return subprocess.run(
            ["docker", "--host", f"unix://{self.socket}", *arguments],
            input=stdin, capture_output=True, check=False, timeout=100,
        )  # fmt: skip

    def names(self, *more: str) -> list[str]:
        """All containers, dead ones too."""
        done = self.docker("ps", "--all", "--format={{.Names}}", *more)
        done.check_returncode()
        return done.stdout.decode().split()

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.docker("inspect", name).stdout)
        return dict(found)

    def kill(self) -> None:
        """SIGKILL of the engine alone; its containers live on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends containers and engine."""
        if self._process is not None and self._process.poll() is None:
            for name in self.names():
                self.docker("rm", "--force", name)
            self._process.terminate()
            self._process.wait(60)

    def close(self) -> None:
        self.stop()
        # What --live-restore keeps: its containerd goes with it, mounts may not.
        for line in Path("/proc/self/mounts").read_text().splitlines():
            mounted = line.split()[1]
            if mounted.startswith(f"{self.place}/"):
                subprocess.run(["umount", "--lazy", mounted], check=False, capture_output=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.place)
