"""What a container task may ask of its engine: flags by an allow-list, everything else refused.

The arguments are parsed here, and what is allowed is written anew as ``--name=value``: the engine
never sees a word of the task's that could be read in two ways.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Sequence
from typing import Final

from stockade.sandbox.errors import ContainerRefusedError

ALLOWED_BY_DEFAULT: Final = ("env", "entrypoint", "user", "volume", "workdir")

# What a configuration may allow: none of these takes anything from the host's or the engine's
# isolation. True: the flag takes a value.
KNOWN: Final[dict[str, bool]] = {
    "add-host": True,
    "cap-drop": True,
    "dns": True,
    "dns-search": True,
    "domainname": True,
    "entrypoint": True,
    "env": True,
    "group-add": True,
    "hostname": True,
    "no-healthcheck": False,
    "platform": True,
    "read-only": False,
    "shm-size": True,
    "stop-signal": True,
    "tmpfs": True,
    "user": True,
    "volume": True,
    "workdir": True,
}
_SHORT: Final = {
    "e": "env", "u": "user", "v": "volume", "w": "workdir", "h": "hostname", "d": "detach",
    "i": "interactive", "t": "tty", "p": "publish", "P": "publish-all", "l": "label",
    "m": "memory", "c": "cpu-shares", "a": "attach",
}  # fmt: skip

_HOST: Final = "it would give the task power over the host"
_LIMIT: Final = "limits are the dispatch's `limits`"
_OWN: Final = "it is the worker's to set"
_FILE: Final = "it reads or writes files of the host in the worker's name"
# Why the refused ones that people try are refused; any other is simply not on the list.
_REASONS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("privileged", "device", "device-cgroup-rule", "device-read-bps", "gpus", "cap-add",
         "security-opt", "pid", "ipc", "uts", "userns", "cgroupns", "cgroup-parent", "sysctl",
         "runtime", "isolation", "annotation", "volume-driver", "volumes-from", "mount",
         "storage-opt", "oom-score-adj", "oom-kill-disable", "init-path", "rootfs",
         "secret", "module", "hooks-dir", "conmon-pidfile", "preserve-fds"),
        _HOST,
    ),
    **dict.fromkeys(
        ("memory", "memory-swap", "memory-reservation", "memory-swappiness", "cpus", "cpu-shares",
         "cpu-quota", "cpu-period", "cpuset-cpus", "pids-limit", "ulimit", "blkio-weight",
         "kernel-memory"),
        _LIMIT,
    ),
    **dict.fromkeys(
        ("name", "label", "rm", "init", "detach", "restart", "network", "net", "network-alias",
         "stop-timeout", "log-driver", "log-opt", "pull", "sig-proxy", "detach-keys", "attach",
         "interactive", "tty", "replace", "cgroups", "systemd", "health-cmd", "quiet"),
        _OWN,
    ),
    **dict.fromkeys(
        ("env-file", "label-file", "cidfile", "pidfile", "env-host", "env-merge", "http-proxy",
         "pod", "pod-id-file"),
        _FILE,
    ),
    "publish": "a task serves nobody",
    "publish-all": "a task serves nobody",
    "link": "a task serves nobody",
    "expose": "a task serves nobody",
}  # fmt: skip

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_VOLUME_OPTIONS: Final = frozenset({"ro", "rw"})


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What may be asked for.

    Attributes:
        flags: names in KNOWN.
        volumes: absolute paths; what is mounted is one of them or below one.
        hidden: paths that are never mounted, nor anything above them: the engine's socket, the
            worker's own directories.
    """

    flags: tuple[str, ...]
    volumes: tuple[str, ...]
    hidden: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A task's arguments, taken apart.

    Attributes:
        flags: for the engine, each one word.
        environment: variables by name.
        command: what comes after the image.
    """

    flags: tuple[str, ...]
    environment: dict[str, str]
    command: tuple[str, ...]


def parse(words: Sequence[str], policy: Policy) -> Arguments:
    """Flags until the first word that is none, or until ``--``; the rest is the command.

    Raises:
        ContainerRefusedError: a flag is not allowed, and why.
    """
    flags: list[str] = []
    environment: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, value, spelled = _split(word)
        if name not in policy.flags:
            raise ContainerRefusedError(_why_not(spelled, name, policy))
        if KNOWN[name]:
            if value is None:
                if not rest:
                    raise ContainerRefusedError(f"flag {spelled} has no value")
                value = rest.pop(0)
        elif value is not None:
            raise ContainerRefusedError(f"flag {spelled} takes no value")
        if name == "env":
            variable, content = _variable(value or "")
            environment[variable] = content
        elif name == "volume":
            flags.append(f"--volume={_volume(value or '', policy)}")
        else:
            flags.append(f"--{name}" if value is None else f"--{name}={value}")
    return Arguments(tuple(flags), environment, tuple(rest))


def _split(word: str) -> tuple[str, str | None, str]:
    """A flag's long name, its value if it is in the same word, and the flag as it was spelled."""
    value: str | None
    if word.startswith("--"):
        name, equals, after = word[2:].partition("=")
        return name, after if equals else None, f"--{name}"[:80]
    letter, attached = word[1:2], word[2:]
    name = _SHORT.get(letter, letter)
    value = attached.removeprefix("=") if attached else None
    return name, value, f"-{letter}"


def _why_not(spelled: str, name: str, policy: Policy) -> str:
    because = _REASONS.get(name, "it is not on the list")
    allowed = ", ".join(f"--{flag}" for flag in sorted(policy.flags)) or "none"
    return f"flag {spelled} is not allowed: {because}; allowed are {allowed}"


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise ContainerRefusedError(f"{name[:80]!r} is not the name of an environment variable")
    if not equals:
        raise ContainerRefusedError(
            f"--env {name} has no value: write --env {name}=VALUE; nothing is taken from the"
            " worker's environment"
        )
    return name, value


def _volume(text: str, policy: Policy) -> str:
    source, _, rest = text.partition(":")
    target, _, options = rest.partition(":")
    shown = text[:200]
    if not source.startswith("/"):
        raise ContainerRefusedError(
            f"volume {shown!r} is not allowed: only host paths below task.container.volumes are,"
            " written /host/path:/path or /host/path:/path:ro"
        )
    if not target.startswith("/") or "," in source + target or ":" in options:
        raise ContainerRefusedError(f"volume {shown!r} is not of the form /host/path:/path[:ro]")
    unknown = [word for word in options.split(",") if word and word not in _VOLUME_OPTIONS]
    if unknown:
        raise ContainerRefusedError(
            f"volume {shown!r}: option {unknown[0][:40]!r} is not allowed; ro and rw are"
        )
    # What the engine would mount: it follows links, and so must the check.
    real = os.path.realpath(source)
    if not any(_is_within(real, os.path.realpath(root)) for root in policy.volumes):
        allowed = ", ".join(policy.volumes) or "none"
        raise ContainerRefusedError(
            f"volume {shown!r} is not allowed: {real} is below none of task.container.volumes"
            f" ({allowed})"
        )
    for path in policy.hidden:
        if _is_within(os.path.realpath(path), real) or _is_within(real, os.path.realpath(path)):
            raise ContainerRefusedError(f"volume {shown!r} is not allowed: it holds {path}")
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        # The engine would make it, as root.
        raise ContainerRefusedError(f"volume {shown!r}: {real}: {error.strerror}") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ContainerRefusedError(
            f"volume {shown!r} is not allowed: {real} is neither a directory nor a regular file"
        )
    return ":".join((real, target, options or "rw"))


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
