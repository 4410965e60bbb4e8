"""Container engines of the tests' own: their sockets, their data, one small image.

Docker: ``dockerd`` of Debian's docker.io runs as root in most places, without touching the host's
network: no bridge, no iptables. Podman: its API service. What the image holds is busybox, imported
from a tree.
"""

from __future__ import annotations

import abc
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

IMAGE = "stockade-test:1"
_APPLETS = (
    "sh", "cat", "echo", "env", "false", "head", "id", "kill", "ls", "mkdir", "printenv", "ps",
    "pwd", "seq", "sleep", "stat", "tail", "touch", "tr", "true", "yes", "dd", "wc",
)  # fmt: skip
_START_S = 60.0


class EngineFailedError(Exception):
    """The engine cannot run here, with its own words."""


class EngineLab(abc.ABC):
    """One engine."""

    program: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    packages: ClassVar[str]

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="stockade-engine-", dir="/tmp"))
        self.socket = self.place / "engine.sock"
        self._log = self.place / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client_program(self) -> str:
        """What a worker is told to call."""
        return self.program

    @classmethod
    def why_not(cls) -> str:
        """Why it cannot be run here; empty when it is worth a try."""
        if os.geteuid() != 0:
            return f"needs root: {cls.program}"
        missing = [name for name in cls.programs if shutil.which(name) is None]
        return f"needs {', '.join(missing)}: apt install {cls.packages}" if missing else ""

    @abc.abstractmethod
    def _command(self) -> list[str]:
        """What serves the socket."""

    @abc.abstractmethod
    def _client(self) -> list[str]:
        """The client, up to its verb."""

    def _popen(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **environment},
                # Podman's conmon leaves a file where it was started.
                cwd=self.place,
            )  # fmt: skip

    def start(self) -> None:
        """Starts it and returns when it answers.

        Raises:
            EngineFailedError: it does not.
        """
        self._process = self._popen(self._command())
        end = time.monotonic() + _START_S
        while self.call("version").returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                text = self._log.read_text()[-600:]
                self.stop()
                raise EngineFailedError(f"{self.program} does not run here: {text}")
            time.sleep(0.05)

    def make_image(self) -> None:
        """IMAGE; and one container from it, since an engine that starts may still run none.

        Raises:
            EngineFailedError: it runs no container here.
        """
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
        self.call("import", "-", IMAGE, stdin=archive).check_returncode()
        tried = self.call("run", "--rm", "--network=none", "--init", IMAGE, "true")
        if tried.returncode:
            raise EngineFailedError(
                f"{self.program} runs no container here: {tried.stderr.decode()[-400:]}"
            )

    def call(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Any client's command: for looking at, and disturbing, what Stockade does."""
        return subprocess.run(
            [*self._client(), *arguments], input=stdin, capture_output=True, check=False,
            timeout=100,
        )  # fmt: skip

    def names(self, *more: str) -> list[str]:
        """All containers, dead ones too."""
        done = self.call("ps", "--all", "--format={{.Names}}", *more)
        done.check_returncode()
        return done.stdout.decode().split()

    def inspect(self, name: str) -> dict[str, Any]:
        (found,) = json.loads(self.call("container", "inspect", name).stdout)
        return dict(found)

    def tells_oom(self) -> bool:
        """Whether its inspect tells of an OOM kill here; Podman's does not on cgroup v1."""
        self.call(
            "run", "--name=oom", "--network=none", "--memory=32m", "--memory-swap=32m", IMAGE,
            "dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1",
        )  # fmt: skip
        end = time.monotonic() + 3
        while not (told := self.inspect("oom")["State"]["OOMKilled"]) and time.monotonic() < end:
            time.sleep(0.1)
        self.call("rm", "--force", "oom")
        return bool(told)

    def kill(self) -> None:
        """SIGKILL of the engine alone; its containers live on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ends containers and engine."""
        if self._process is not None and self._process.poll() is None:
            for name in self.names():
                self.call("rm", "--force", name)
            self._process.terminate()
            self._process.wait(60)

    def close(self) -> None:
        """Ends all and removes every trace."""
        self.stop()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mounted = line.split()[1]
            if mounted.startswith(f"{self.place}/"):
                subprocess.run(["umount", "--lazy", mounted], check=False, capture_output=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.place)


class Docker(EngineLab):
    """dockerd, with a containerd of its own beside it so that dockerd can be killed alone."""

    program = "docker"
    programs = ("dockerd", "containerd", "docker", "busybox")
    packages = "docker.io busybox-static"

    def __init__(self) -> None:
        super().__init__()
        self._containerd: subprocess.Popen[bytes] | None = None

    def _command(self) -> list[str]:
        return [
            "dockerd", "--host", f"unix://{self.socket}",
            "--containerd", f"{self.place}/containerd.sock", "--data-root", f"{self.place}/data",
            "--exec-root", f"{self.place}/exec", "--pidfile", f"{self.place}/pid",
            "--storage-driver=vfs", "--iptables=false", "--ip6tables=false", "--bridge=none",
            "--ip-forward=false", "--ip-masq=false", "--live-restore",
        ]  # fmt: skip

    def _client(self) -> list[str]:
        return ["docker", "--host", f"unix://{self.socket}"]

    def start(self) -> None:
        if self._containerd is None:
            configuration = self.place / "containerd.toml"
            configuration.write_text(
                f"""
                version = 2
                root = "{self.place}/containerd"
                state = "{self.place}/containerd-run"
                disabled_plugins = ["io.containerd.grpc.v1.cri"]
                [grpc]
                address = "{self.place}/containerd.sock"
                """
            )
            self._containerd = self._popen(["containerd", "--config", str(configuration)])
        super().start()

    def stop(self) -> None:
        super().stop()
        if self._containerd is not None:
            self._containerd.terminate()
            self._containerd.wait(60)
            self._containerd = None


class Podman(EngineLab):
    """Podman's API service."""

    program = "podman"
    programs = ("podman", "conmon", "catatonit", "busybox")
    packages = "podman catatonit busybox-static"

    def _command(self) -> list[str]:
        # runc also runs where cgroup v1 and v2 are both mounted.
        runtime = next(filter(None, map(shutil.which, ("runc", "crun"))), "crun")
        return [
            "podman", "--root", f"{self.place}/root", "--runroot", f"{self.place}/runroot",
            "--tmpdir", f"{self.place}/tmp", "--storage-driver", "vfs", "--runtime", runtime,
            "--cgroup-manager", "cgroupfs", "--events-backend", "file",
            "system", "service", "--time", "0", f"unix://{self.socket}",
        ]  # fmt: skip

    def _popen(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        configuration = self.place / "containers.conf"
        # Podman's own default raises limits, which takes more than root in a container has.
        configuration.write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n'
        )
        return super()._popen(command, CONTAINERS_CONF=str(configuration), **environment)

    def _client(self) -> list[str]:
        return ["podman", "--remote", "--url", f"unix://{self.socket}"]

    @property
    def client_program(self) -> str:
        # Podman raises nproc by itself, which takes more than root in a container has.
        path = self.place / "bin" / "podman"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            '#!/bin/sh\nif [ "$4" = run ]; then\n  a=$1 b=$2 c=$3; shift 4\n'
            '  exec /usr/bin/podman "$a" "$b" "$c" run --ulimit=nproc=1000:1000 "$@"\nfi\n'
            'exec /usr/bin/podman "$@"\n'
        )
        path.chmod(0o755)
        return str(path)
