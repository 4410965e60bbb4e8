"""The worker's configuration: every section and key, its type, range and default.

The structs are the only list of keys: files, environment names, ``config show`` and the test of
docs/configuration.md derive from them. Reading and merging is ``config_load``'s. A value here was
checked there, and the configuration never changes while it is used.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import msgspec

from stockade.sandbox.engine_flags import ALLOWED_BY_DEFAULT, KNOWN
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.profiles import Profile
from stockade.supervisor.config_values import (
    ADVERTISED,
    COMMAND,
    ENVIRONMENT,
    GRPC_ADDRESS,
    GRPC_ADDRESSES,
    LABELS,
    NETWORKS,
    OPTIONAL_ADDRESS,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    PATH,
    PATHS,
    PLACES,
    SWITCH,
    TEXT,
    URL,
    URLS,
    WORKER_ID,
    Kind,
    ceiling,
    choice,
    count,
    limit,
    names,
    optional,
    percentage,
    seconds,
    size,
)
from stockade.supervisor.limits import LIMIT_FIELDS
from stockade.supervisor.task_types.http_access import DENIED_BY_DEFAULT

ENVIRONMENT_PREFIX: Final = "STOCKADE_"


class OnUnsupported(enum.StrEnum):
    """What the worker does when the host lacks what the profile or a limit needs."""

    REFUSE = "refuse"
    DEGRADE = "degrade"


class Protocol(enum.StrEnum):
    """A link that the worker registers over."""

    HTTP = "http"
    GRPC = "grpc"


class Dialect(enum.StrEnum):
    """Where and in which form a result is reported."""

    TASK_INSTANCES = "task-instances"
    TASK_RESULT = "task-result"


class LogLevel(enum.StrEnum):
    """The least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[worker]``. Keys without a default here get one from the host; see ``config_defaults``.

    Attributes:
        id: stable name of this worker; also names its cgroup.
        user: whom the supervisor becomes when started as root.
        history: seconds that a task's row and output stay after that, within a size of 1 GiB.
        uid_min: first uid of the range that tasks run as when the worker was started as root.
        uid_max: last one.
        protocol: the one link to register over; None: each link registers with its scheduler.
        pool_min: slots that wait ready for tasks when nothing has happened for long.
        pool_max: most slots that may wait ready; 0 for none at all.
        memory_max: bytes that all tasks together may use; also what their own limits may add up to.
        cpu_quota: CPUs that all tasks together may use.
        tasks_max: processes and threads of all tasks together.
        pressure_memory: share of the last ten seconds in which all of the host's work waited for
            memory; from there on nothing is started.
        pressure_cpu: share of the last ten seconds in which some work waited for a CPU.
    """

    id: Annotated[str, WORKER_ID]
    user: Annotated[str, TEXT] = "stockade"
    state_dir: Annotated[Path, PATH]
    runtime_dir: Annotated[Path, PATH]
    max_concurrency: Annotated[int, count(1, 100_000)]
    labels: Annotated[dict[str, str], LABELS] = {}
    drain_timeout: Annotated[float, seconds(0)] = 300.0
    on_unsupported: Annotated[OnUnsupported, choice(OnUnsupported)] = OnUnsupported.REFUSE
    dedup_ttl: Annotated[float, seconds(0)] = 300.0
    dedup_sweep: Annotated[float, seconds(0.01)] = 30.0
    history: Annotated[float, seconds(0)] = 7 * 86400.0
    protocol: Annotated[Protocol | None, optional(choice(Protocol))] = None
    # A range that no distribution's tools hand out (systemd's documentation, UIDS-GIDS.md, calls
    # 0x70000000 up to 0x7fffffff unused).
    uid_min: Annotated[int, count(1000, 2**32 - 3)] = 0x70000000
    uid_max: Annotated[int, count(1000, 2**32 - 3)]
    pool_min: Annotated[int, count(0, 1000)] = 2
    pool_max: Annotated[int, count(0, 1000)] = 16
    memory_max: Annotated[int | None, ceiling("memory_max")] = None
    cpu_quota: Annotated[float | None, ceiling("cpu_quota")] = None
    tasks_max: Annotated[int | None, ceiling("tasks_max")] = None
    pressure_memory: Annotated[float | None, percentage()] = 0.2
    pressure_cpu: Annotated[float | None, percentage()] = None
    log_level: Annotated[LogLevel, choice(LogLevel)] = LogLevel.INFO


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[profile]``. Paths are absolute; of two the longer one decides about what is in it.

    Attributes:
        name: how strongly a task is confined that asks for nothing stronger.
        read_only_paths: what tasks see although it lies in a home, /run or /tmp.
        read_write_paths: what tasks may change besides their work directory, as modes allow.
        inaccessible_paths: what tasks do not see.
        private_network: no network but loopback, in ``private`` too.
    """

    name: Annotated[Profile, choice(Profile)] = Profile.PRIVATE
    read_only_paths: Annotated[tuple[str, ...], PATHS] = ()
    read_write_paths: Annotated[tuple[str, ...], PATHS] = ()
    inaccessible_paths: Annotated[tuple[str, ...], PATHS] = ()
    private_network: Annotated[bool, SWITCH] = False


class LinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the section of each link has. A link runs if ``listen`` or ``scheduler`` is set.

    Attributes:
        listen: ``host:port`` or ``[IPv6]:port``; port 0 is any free one; None: it only calls.
        advertise: ``host`` or ``host:port`` that the scheduler is told; None: found by itself.
        scheduler: where it is; None: no scheduler, only listen.
        allow_schedulers: further ones that a dispatch may name.
        token_file: file with the bearer token, for both directions.
        tls_cert: our certificate, PEM: the listener then takes TLS only; None: plain.
        tls_key: its private key, PEM.
        tls_ca: authorities of the scheduler's certificate, PEM; None: the system's.
        tls_client_ca: authorities that callers must show a certificate of; None: none asked for.
        allow_networks: networks, as ``10.0.0.0/8``, that callers may be in; empty: any.
    """

    listen: Annotated[str | None, OPTIONAL_ADDRESS] = None
    advertise: Annotated[str | None, ADVERTISED] = None
    scheduler: Annotated[str | None, URL] = None
    allow_schedulers: Annotated[tuple[str, ...], URLS] = ()
    heartbeat_interval: Annotated[float, seconds(0.01)] = 10.0
    token_file: Annotated[Path | None, OPTIONAL_PATH] = None
    tls_cert: Annotated[Path | None, OPTIONAL_PATH] = None
    tls_key: Annotated[Path | None, OPTIONAL_PATH] = None
    tls_ca: Annotated[Path | None, OPTIONAL_PATH] = None
    tls_client_ca: Annotated[Path | None, OPTIONAL_PATH] = None
    allow_networks: Annotated[tuple[str, ...], NETWORKS] = ()

    @property
    def runs(self) -> bool:
        """Whether there is this link."""
        return self.listen is not None or self.scheduler is not None


class HttpConfig(LinkConfig, frozen=True, kw_only=True):
    """``[http]``: schedulers are base URLs without a slash at their end."""

    listen: Annotated[str | None, OPTIONAL_ADDRESS] = "127.0.0.1:8081"


class GrpcConfig(LinkConfig, frozen=True, kw_only=True):
    """``[grpc]``: schedulers are ``host:port``, or ``https://host:port`` for TLS."""

    scheduler: Annotated[str | None, GRPC_ADDRESS] = None
    allow_schedulers: Annotated[tuple[str, ...], GRPC_ADDRESSES] = ()


class ReportConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[report]``.

    Attributes:
        excerpt: bytes of a task's output that its terminal report carries.
        refused_tries: tries of a report that the scheduler refuses before it is a dead letter ...
        refused_period: ... and the least seconds from the first of them to the last.
    """

    excerpt: Annotated[int, size(0, MIB)] = 1024
    dialect: Annotated[Dialect, choice(Dialect)] = Dialect.TASK_INSTANCES
    attempt_timeout: Annotated[float, seconds(0.01)] = 10.0
    retry_min: Annotated[float, seconds(0.001)] = 1.0
    retry_max: Annotated[float, seconds(0.001)] = 30.0
    refused_tries: Annotated[int, count(1, 1000)] = 5
    refused_period: Annotated[float, seconds(0)] = 120.0


class ShellConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[task.shell]``.

    Attributes:
        environment: further variables of every shell task. May hold secrets: never printed.
        interpreter: program and arguments that a payload is added to.
        lang: LANG of the task.
        path: PATH of the task.
    """

    environment: Annotated[dict[str, str], ENVIRONMENT] = {}
    interpreter: Annotated[tuple[str, ...], COMMAND] = ("/bin/bash", "-lc")
    lang: Annotated[str, TEXT] = "C.UTF-8"
    path: Annotated[str, TEXT] = "/usr/local/bin:/usr/bin:/bin"


class HttpTaskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[task.http]``.

    Attributes:
        allow: the only hosts and networks that are connected to; empty: all not denied.
        body_max: bytes of a response that are read; the rest is cut.
        connect_timeout: longest until a server is connected to.
        deny: hosts and networks that are never connected to.
        redirects_max: redirects that are followed.
    """

    allow: Annotated[tuple[str, ...], PLACES] = ()
    body_max: Annotated[int, size(0, 1024 * MIB)] = MIB
    connect_timeout: Annotated[float, seconds(0.01)] = 10.0
    deny: Annotated[tuple[str, ...], PLACES] = DENIED_BY_DEFAULT
    redirects_max: Annotated[int, count(0, 100)] = 5


class Pull(enum.StrEnum):
    """When a container task's image is fetched."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


class ContainerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``[task.container]``.

    Attributes:
        engine: the client, by name or path; empty: docker or podman, whichever is there first.
        flags: what a payload may ask of the engine's run.
        network: what containers are connected to in the profiles process and private.
        pull: when images are fetched.
        socket: the engine's API socket; None: where it usually is.
        volumes: host paths that a payload may mount, they and what is below them.
    """

    engine: Annotated[str, OPTIONAL_TEXT] = ""
    flags: Annotated[tuple[str, ...], names(KNOWN)] = ALLOWED_BY_DEFAULT
    network: Annotated[str, TEXT] = "bridge"
    pull: Annotated[Pull, choice(Pull)] = Pull.MISSING
    socket: Annotated[Path | None, OPTIONAL_PATH] = None
    volumes: Annotated[tuple[str, ...], PATHS] = ()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``limits_max`` is ``[limits.max]``, what no task's wish goes beyond."""

    worker: WorkerConfig
    profile: ProfileConfig
    limits: Limits
    limits_max: Limits
    http: HttpConfig
    grpc: GrpcConfig
    report: ReportConfig
    task_shell: ShellConfig
    task_http: HttpTaskConfig
    task_container: ContainerConfig

    @property
    def links(self) -> dict[str, LinkConfig]:
        """The sections of the links that run, by name."""
        return {
            name: section
            for name, section in (("http", self.http), ("grpc", self.grpc))
            if section.runs
        }


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration and where it came from.

    Attributes:
        sources: by ``section.key``: ``default``, ``file PATH``, ``environment NAME`` or
            ``flag --NAME``; a default that follows from another key says so in brackets.
        warnings: whole sentences for the log.
        file: the configuration file, if one was read.
    """

    config: Config
    sources: dict[str, str]
    file: Path | None = None
    warnings: tuple[str, ...] = ()


SECTIONS: Final[dict[str, type]] = {
    "worker": WorkerConfig,
    "profile": ProfileConfig,
    "limits": Limits,
    "limits.max": Limits,
    "http": HttpConfig,
    "grpc": GrpcConfig,
    "report": ReportConfig,
    "task.shell": ShellConfig,
    "task.http": HttpTaskConfig,
    "task.container": ContainerConfig,
}
"""Type of each section, by its name in the file. The field of Config has underscores for dots."""

NO_DEFAULT: Final = msgspec.NODEFAULT


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key. ``default`` is NO_DEFAULT where the host or another key decides."""

    section: str
    name: str
    kind: Kind
    default: Any

    @property
    def dotted(self) -> str:
        """``section.key``, as messages and sources name it."""
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        """The environment variable that sets it."""
        return ENVIRONMENT_PREFIX + self.dotted.replace(".", "_").upper()


def _keys(section: str, struct: type) -> list[Key]:
    if struct is Limits:
        # An unset maximum follows [limits]; only runtime_max is unlimited until set.
        follows = section == "limits.max"
        return [
            Key(
                section,
                name,
                limit(name),
                (None if name == "runtime_max" else NO_DEFAULT) if follows else field.default,
            )
            for name, field in LIMIT_FIELDS.items()
        ]
    hints = get_type_hints(struct, include_extras=True)
    return [
        Key(
            section,
            field.name,
            hints[field.name].__metadata__[0],
            field.default_factory()
            if field.default is NO_DEFAULT and field.default_factory is not NO_DEFAULT
            else field.default,
        )
        for field in msgspec.structs.fields(struct)
    ]


KEYS: Final[dict[str, Key]] = {
    key.dotted: key for section, struct in SECTIONS.items() for key in _keys(section, struct)
}
"""Every key by its dotted name, in the order of the documentation."""
