"""A container engine's command lines, built from typed fields: there is no other way to one.

The verbs are run, inspect, stop, kill, remove and list-by-label, and every container is one of ours
by name and label. Docker and Podman are both spoken to by their own client over their API socket:
for Podman that is ``podman.socket``, since a client that makes containers itself would need all of
root's capabilities, which the spawner has given up.

The container is run without ``--rm``: the engine would remove it the moment it ends, and with it
all that tells the task's own exit status 125 from the engine's, and an OOM kill from a SIGKILL. It
is removed by us as soon as it was inspected, and swept by label if nobody was left to do that.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import resource
from collections.abc import Sequence
from typing import Final

from stockade.sandbox import engine_flags
from stockade.sandbox.errors import ContainerRefusedError
from stockade.sandbox.limits import Limits
from stockade.sandbox.tree import safe_name

LABEL_WORKER: Final = "stockade.worker"
LABEL_INSTANCE: Final = "stockade.instance"
LABEL_SEQ: Final = "stockade.seq"
INSPECT_FORMAT: Final = "{{json .State}}\n{{json .HostConfig}}"

# A line of an environment file is read by the engines into 64 KiB.
_FILE_LINE_BYTES_MAX: Final = 32 * 1024
_ENVIRONMENT_FILE: Final = "/dev/stdin"
# distribution/reference: [host[:port]/]path[:tag][@digest]. Nothing that Podman would take for a
# transport such as dir:/etc, nor for a flag.
_COMPONENT: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE: Final = re.compile(
    r"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]+)?/)?"
    rf"{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
# Whoever reaches one of these is root.
_ENGINES_OWN: Final = (
    "/run/docker.sock", "/run/docker", "/run/containerd", "/run/podman", "/run/crio",
)  # fmt: skip
_IMAGE_CHARACTERS_MAX: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine, and what tasks may ask of it.

    Attributes:
        program: absolute path of its client.
        socket: absolute path of its API socket.
        network: what containers are connected to, unless the profile gives them none.
        pull: ``missing``, ``always`` or ``never``.
        flags: what engine_flags.Policy takes.
        volumes: the same.
    """

    program: str
    socket: str
    network: str = "bridge"
    pull: str = "missing"
    flags: tuple[str, ...] = engine_flags.ALLOWED_BY_DEFAULT
    volumes: tuple[str, ...] = ()

    @property
    def is_podman(self) -> bool:
        return "podman" in os.path.basename(self.program)


@dataclasses.dataclass(frozen=True, slots=True)
class RunLine:
    """A container to run.

    Attributes:
        environment_file: what the client reads from its standard input as ``--env-file``.
    """

    name: str
    argv: tuple[bytes, ...]
    environment_file: bytes


class Engine:
    """Builds command lines for one worker's containers.

    Args:
        hidden: paths of the worker's own that no container may mount.
        private_network: no network in the profile private either.
    """

    def __init__(
        self, settings: EngineSettings, worker_id: str, hidden: Sequence[str] = (), *,
        private_network: bool = False,
    ) -> None:  # fmt: skip
        self.settings = settings
        self._worker = safe_name(worker_id)
        self._private_network = "none" if private_network else settings.network
        host = f"unix://{settings.socket}"
        self._client = (
            (settings.program, "--remote", "--url", host)
            if settings.is_podman
            else (settings.program, "--host", host)
        )
        self._policy = engine_flags.Policy(
            settings.flags, settings.volumes, (settings.socket, *_ENGINES_OWN, *hidden)
        )

    @property
    def environment(self) -> dict[str, str]:
        """The client's, for every verb. Registry logins are those of the spawner's user."""
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            # A uid without an account, such as a container's of any number.
            home = "/"
        variables = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": home,
        }
        if not self.settings.is_podman:
            # In a slot HOME is the work directory. Podman takes a missing file here for an error.
            variables["DOCKER_CONFIG"] = os.path.join(home, ".docker")
        return variables

    def run(
        self, *, seq: int, instance_id: str, image: str, words: Sequence[bytes],
        environment: Sequence[bytes], limits: Limits, profile: str,
    ) -> RunLine:  # fmt: skip
        """The line that runs one task's container.

        Args:
            seq: the task's.
            instance_id: any text.
            image: as the dispatch has it.
            words: the task's arguments: flags, then the command.
            environment: ``K=V``, the worker's, which wins over what the task asks for.
            limits: the container's.
            profile: the task's.

        Raises:
            ContainerRefusedError: the image or an argument is not allowed.
        """
        if len(image) > _IMAGE_CHARACTERS_MAX or not _IMAGE.fullmatch(image):
            raise ContainerRefusedError(
                f"{image[:100]!r} is not an image's name such as registry.example/app:1.0"
                if image
                else "there is no image"
            )
        asked = engine_flags.parse([_text(word) for word in words], self._policy)
        own = dict(_text(entry).split("=", 1) for entry in environment)
        in_file, beside = _environment({**asked.environment, **own})
        instance = safe_name(instance_id)
        name = f"stockade-{self._worker}-{seq}-{instance}"
        argv = (
            *self._client, "run", f"--name={name}",
            f"--label={LABEL_WORKER}={self._worker}",
            f"--label={LABEL_INSTANCE}={instance}",
            f"--label={LABEL_SEQ}={seq}",
            f"--pull={self.settings.pull}",
            # What it prints comes by the client, bounded; the engine would keep all of it.
            "--log-driver=none",
            "--init",
            *_limit_flags(limits),
            *self._profile_flags(profile),
            f"--env-file={_ENVIRONMENT_FILE}",
            *beside, *asked.flags, image, *asked.command,
        )  # fmt: skip
        return RunLine(
            name=name,
            argv=tuple(word.encode("utf-8", "surrogateescape") for word in argv),
            environment_file=in_file,
        )

    def _profile_flags(self, profile: str) -> tuple[str, ...]:
        match profile:
            case "sealed":
                return (
                    "--network=none", "--security-opt=no-new-privileges", "--cap-drop=ALL",
                )  # fmt: skip
            case "private":
                return f"--network={self._private_network}", "--security-opt=no-new-privileges"
            case _:
                return (f"--network={self.settings.network}",)

    def inspect(self, name: str) -> list[str]:
        return [*self._client, "container", "inspect", f"--format={INSPECT_FORMAT}", name]

    def stop(self, name: str, grace_s: float | None) -> list[str]:
        """SIGTERM, or the image's own signal, then SIGKILL after the grace, in whole seconds."""
        grace = () if grace_s is None else ("-t", str(max(1, round(grace_s))))
        return [*self._client, "container", "stop", *grace, name]

    def kill(self, name: str) -> list[str]:
        return [*self._client, "container", "kill", name]

    def remove(self, name: str) -> list[str]:
        """Removes it with its anonymous volumes; one that lives is killed first."""
        return [*self._client, "container", "rm", "--force", "--volumes", name]

    def list_ours(self) -> list[str]:
        """The names of all containers with this worker's label, a line each, dead ones too."""
        return [
            *self._client, "container", "ls", "--all", "--no-trunc",
            f"--filter=label={LABEL_WORKER}={self._worker}", "--format={{.Names}}",
        ]  # fmt: skip


def _ulimit(name: str, kind: int, value: int) -> str:
    """A flag with a limit that the engine may set: one in a container can raise none past its own.

    The engine's own is not known; it is likely ours.
    """
    hard = resource.getrlimit(kind)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    return f"--ulimit={name}={most}:{most}"


def _limit_flags(limits: Limits) -> list[str]:
    flags = []
    if limits.memory_max is not None:
        flags.append(f"--memory={limits.memory_max}b")
        if limits.memory_swap_max is not None:
            # The engines count memory and swap together.
            flags.append(f"--memory-swap={limits.memory_max + limits.memory_swap_max}b")
    if limits.cpu_quota is not None:
        # More CPUs than there are is refused.
        flags.append(f"--cpus={min(limits.cpu_quota, os.cpu_count() or 1):.3f}")
    if limits.cpu_weight is not None:
        flags.append(f"--cpu-shares={max(2, limits.cpu_weight * 1024 // 100)}")
    if limits.tasks_max is not None:
        flags.append(f"--pids-limit={limits.tasks_max}")
    for name, kind, value in (
        ("nofile", resource.RLIMIT_NOFILE, limits.limit_nofile),
        ("core", resource.RLIMIT_CORE, limits.limit_core),
        ("fsize", resource.RLIMIT_FSIZE, limits.limit_fsize),
    ):
        if value is not None:
            flags.append(_ulimit(name, kind, value))
    if limits.timeout_stop is not None:
        flags.append(f"--stop-timeout={max(1, round(limits.timeout_stop))}")
    return flags


def _environment(variables: dict[str, str]) -> tuple[bytes, list[str]]:
    """The environment file, and flags for what a file of lines cannot hold."""
    lines, beside = [], []
    for name, value in variables.items():
        line = f"{name}={value}".encode("utf-8", "surrogateescape")
        breaks = any(byte in line for byte in b"\n\r\0")
        if breaks or len(line) > _FILE_LINE_BYTES_MAX or not _is_utf8(line):
            beside.append(f"--env={name}={value}")
        else:
            lines.append(line + b"\n")
    return b"".join(lines), beside


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _text(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")
