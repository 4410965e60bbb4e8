"""The container image on an engine of its own: its base, its build, and containers of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from engine_lab import Docker, EngineFailedError
from lab import debian_root, parcel, roots, wheels
from lab.hosts import HOSTS
from recording_scheduler import RecordingScheduler
from worker_process import DEADLINE_S

from stockade.platform import prctl

FOLDER: Final = parcel.CHECKOUT / "deploy/container"
TAG: Final = "stockade"
CGROUPS: Final = Path("/sys/fs/cgroup")
# Where cgroup v2 lies beside v1, engines give containers v1 alone, so that they take the host's.
UNIFIED: Final = CGROUPS / "unified"
BESIDE_V1: Final = ["--cgroupns=host", "-v", f"{UNIFIED}:{UNIFIED}"] if UNIFIED.exists() else []
OURS: Final = prctl.effective_capabilities()


class ImageEngine(Docker):
    """Docker with its data in memory, since removing layers from a disk can take minutes."""

    programs = ("dockerd", "containerd", "docker", "mmdebstrap")
    packages = "docker.io mmdebstrap"

    def __init__(self) -> None:
        super().__init__()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4G", "none", self.place], check=True)

    def _command(self) -> list[str]:
        command = super()._command()
        command[command.index("--storage-driver=vfs")] = "--storage-driver=overlay2"
        # Not /docker, of which nobody could tell whose it is.
        group = f"--cgroup-parent=/{self.place.name}"
        return [*command, "--exec-opt=native.cgroupdriver=cgroupfs", group]

    def close(self) -> None:
        self.stop()
        for group in CGROUPS.rglob(self.place.name):
            group.rmdir()
        subprocess.run(["umount", "--lazy", self.place], check=True)
        super().close()

    def build(self) -> str:
        """The image as ``stockade``; what the build printed.

        Raises:
            LabUnavailableError: apt here knows no Debian mirror.
            EngineFailedError: a step failed, with its last words.
        """
        self._import_base()
        return self._build("-f", str(FOLDER / "Dockerfile"), "-t", TAG)

    def context(self) -> set[str]:
        """The files that a build of the checkout is given, by path."""
        recipe = self.place / "context"
        recipe.write_text("FROM scratch\nCOPY . /\nCMD none\n")
        self._build("-f", str(recipe), "-t", "context")
        self.call("create", "--name=context", "context").check_returncode()
        try:
            archive = self.call("export", "context").stdout
        finally:
            self.call("rm", "context")
        listed = subprocess.run(
            ["tar", "--list"], input=archive, capture_output=True, check=True
        ).stdout.decode()
        # What every container has is not of the context.
        made = re.compile(r".*/$|dev/console|etc/(hostname|hosts|resolv.conf|mtab)|\.dockerenv")
        return {name for name in listed.splitlines() if not made.fullmatch(name)}

    def _build(self, *options: str) -> str:
        done = subprocess.run(
            [*self._client(), "build", "--network=host", *options, "."], cwd=parcel.CHECKOUT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_BUILDKIT": "0"}, check=False,
        )  # fmt: skip
        text = done.stdout.decode()
        if done.returncode:
            raise EngineFailedError(f"cannot build the image: {text[-3000:]}")
        return text

    def _import_base(self) -> None:
        """What the Dockerfile is FROM, of Debian's packages; apt and pip in it as here."""
        host = HOSTS["debian12"]
        (base,) = set(re.findall(r"^FROM (\S+)", (FOLDER / "Dockerfile").read_text(), re.M))
        root = self.place / "root"
        subprocess.run(debian_root.command(host, root), check=True)
        wheels.download(host, root / "wheels", roots.cache_directory())
        (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        with subprocess.Popen(
            ["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE
        ) as archive:
            subprocess.run(
                [*self._client(), "import", "-", base], stdin=archive.stdout, check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        assert archive.returncode == 0
        shutil.rmtree(root)


def documented_grants() -> list[str]:
    """The options of README.md's ``docker run`` but for names, volumes and variables.

    Of capabilities only those that we have ourselves: an engine can hand on no others.
    """
    block = (FOLDER / "README.md").read_text().split("```sh\n")[1].split("```")[0]
    lines = block.replace("\\\n", " ").splitlines()
    (command,) = (shlex.split(line) for line in lines if line.startswith("docker run"))
    assert command[:3] == ["docker", "run", "-d"]
    assert command[-1] == TAG
    found = []
    words = iter(command[3:-1])
    for word in words:
        if word in ("--init", "--cgroupns=private"):
            found.append(word)
            continue
        value = next(words)
        if word in ("--name", "-v", "-e") or (word == "--cap-add" and f"CAP_{value}" not in OURS):
            continue
        found += [word, value]
    return [*found, *BESIDE_V1]


def pod_grants() -> list[str]:
    """The Kubernetes part's; where an engine has not all capabilities itself, those above it."""
    if "CAP_SYS_RESOURCE" not in OURS:
        return documented_grants()
    return ["--privileged", *BESIDE_V1]


class Container:
    """A worker in a container, whose state is a volume that another can have after it.

    Args:
        grants: further options of ``docker run``.
        variables: of its environment, without ``STOCKADE_``.
    """

    def __init__(
        self, engine: ImageEngine, scheduler: RecordingScheduler, name: str,
        grants: list[str], **variables: str,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._scheduler = scheduler
        self.name = name
        self.url = ""
        # The listener is asked for any port, since the network is the host's.
        settings = {
            "WORKER_ID": name,
            "HTTP_LISTEN": "0.0.0.0:0",
            "HTTP_SCHEDULER": scheduler.url,
            "HTTP_ALLOW_NETWORKS": "127.0.0.0/8",
            **variables,
        }
        self._options = [
            "--network=host", *grants, "-v", f"{name}:/var/lib/stockade",
            *(f"--env=STOCKADE_{key}={value}" for key, value in settings.items()),
        ]  # fmt: skip

    def launch(self) -> None:
        self._engine.call("run", "-d", "--name", self.name, *self._options, TAG).check_returncode()

    def start(self) -> Container:
        """And returns when it has registered and takes tasks."""
        before = len(self._scheduler.workers)
        self.launch()

        def registered(scheduler: RecordingScheduler) -> dict[str, Any] | None:
            assert self.state()["Running"], f"it ended:\n{self.log()}"
            return scheduler.workers[-1] if len(scheduler.workers) > before else None

        self.url = self._scheduler.callback(
            self._scheduler.wait_for(registered, deadline_s=4 * DEADLINE_S)
        )
        return self

    def state(self) -> dict[str, Any]:
        return dict(self._engine.inspect(self.name)["State"])

    def log(self) -> str:
        done = self._engine.call("logs", self.name)
        return (done.stdout + done.stderr).decode()

    def wait(self) -> int:
        """Its exit status."""
        return int(self._engine.call("wait", self.name).stdout)

    def run(self, task: str, payload: str, **fields: Any) -> dict[str, Any]:
        """The terminal report of a task."""
        self.dispatch(task, payload, **fields)
        return self._scheduler.terminal_report(task, 4 * DEADLINE_S)

    def dispatch(self, task: str, payload: str, **fields: Any) -> None:
        status, answer = self._scheduler.dispatch(
            self.url, schedule_instance_id=task, payload=payload, **fields
        )
        assert status in (200, 202), answer

    def until_running(self, task: str) -> None:
        self._scheduler.wait_for(lambda s: "running" in s.kinds(task), 4 * DEADLINE_S)

    def execute(self, *command: str) -> subprocess.CompletedProcess[bytes]:
        return self._engine.call("exec", self.name, *command)

    def doctor(self) -> dict[str, Any]:
        done = self.execute("stockade", "doctor", "--json")
        assert done.returncode == 0, done
        return dict(json.loads(done.stdout))

    def stop(self) -> int:
        """As an operator does; its exit status."""
        self._engine.call("stop", self.name).check_returncode()
        return int(self.state()["ExitCode"])

    def remove(self) -> None:
        """The container; the volume stays."""
        self._engine.call("rm", "--force", self.name)

    def close(self) -> None:
        self.remove()
        self._engine.call("volume", "rm", "--force", self.name)
