"""What no single value shows: keys that contradict each other, or that the host contradicts."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path
from typing import Final

from stockade.supervisor.config import Config, LinkConfig, ReportConfig, WorkerConfig
from stockade.supervisor.limits import format_bytes, format_seconds
from stockade.supervisor.listen import bind_problems, is_loopback, parse_address

# What the scheduler that this worker is made for does; see docs/configuration.md.
_OFFLINE_AFTER_S: Final = 30.0
_MESSAGE_COLUMN_BYTES: Final = 65_535
_NOBODY: Final = 65_534


def check(config: Config) -> tuple[list[str], list[str]]:
    """Problems, each of which makes the configuration unusable, and warnings; whole sentences."""
    problems = [*_worker_problems(config.worker), *_protocol_problems(config)]
    warnings: list[str] = []
    for name, link in config.links.items():
        problems += [*_bind_problems(name, link), *_tls_problems(name, link)]
        warnings += _link_warnings(name, link)
        token_problems, token_warnings = _check_token(name, link.token_file)
        problems += token_problems
        warnings += token_warnings
    problems += _report_problems(config.report)
    warnings += _report_warnings(config.report)
    return problems, warnings


def _worker_problems(worker: WorkerConfig) -> list[str]:
    first, last = worker.uid_min, worker.uid_max
    if last - first + 1 < worker.max_concurrency:
        return [
            f"cannot use worker.uid_min {first} to worker.uid_max {last}: each running task needs"
            f" a uid of its own, and max_concurrency is {worker.max_concurrency}"
        ]
    if first <= _NOBODY <= last:
        return [
            f"cannot use worker.uid_min {first} to worker.uid_max {last}:"
            f" {_NOBODY} among them is the user nobody"
        ]
    return []


def _protocol_problems(config: Config) -> list[str]:
    if not any(link.listen for link in config.links.values()):
        return [
            "cannot use http.listen and grpc.listen: both are empty, so no scheduler could send a"
            " task; give at least one an address"
        ]
    protocol = config.worker.protocol
    if protocol is None:
        return []
    section = config.links.get(protocol.value)
    if section is None or section.listen is None:
        return [
            f"cannot use worker.protocol {protocol.value}: a scheduler would be told to call back"
            f" over it, and nothing listens; set {protocol.value}.listen"
        ]
    if section.scheduler is None and any(link.scheduler for link in config.links.values()):
        return [
            f"cannot use worker.protocol {protocol.value}: there is no {protocol.value}.scheduler"
            " to register with; set it, or leave worker.protocol empty"
        ]
    return []


def _bind_problems(name: str, link: LinkConfig) -> list[str]:
    if link.listen is None:
        return []
    return bind_problems(
        name,
        listen=link.listen,
        advertise=link.advertise,
        scheduler=link.scheduler,
        callers_known=link.token_file is not None or link.tls_client_ca is not None,
        allow_networks=link.allow_networks,
    )


def _tls_problems(name: str, link: LinkConfig) -> list[str]:
    problems = []
    if (link.tls_cert is None) != (link.tls_key is None):
        given, absent = ("cert", "key") if link.tls_key is None else ("key", "cert")
        problems.append(
            f"cannot use {name}.tls_{given}: it needs {name}.tls_{absent}; set both or neither"
        )
    if link.tls_client_ca is not None and link.tls_cert is None:
        problems.append(
            f"cannot use {name}.tls_client_ca: callers show certificates to a TLS listener only;"
            f" set {name}.tls_cert and {name}.tls_key"
        )
    for key in ("tls_cert", "tls_key", "tls_ca", "tls_client_ca"):
        path: Path | None = getattr(link, key)
        if path is None:
            continue
        try:
            path.stat()
        except OSError as error:
            problems.append(f"cannot read {name}.{key} {path}: {error.strerror}")
    return problems


def _check_token(name: str, path: Path | None) -> tuple[list[str], list[str]]:
    if path is None:
        return [], []
    try:
        status = path.stat()
    except OSError as error:
        return [f"cannot read {name}.token_file {path}: {error.strerror}"], []
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return [f"cannot use {name}.token_file {path}: it is empty or not a regular file"], []
    if status.st_mode & stat.S_IROTH:
        return [], [f"{name}.token_file {path} is readable by everyone; chmod o-r mends that"]
    return [], []


def _report_problems(report: ReportConfig) -> list[str]:
    if report.retry_min <= report.retry_max:
        return []
    return [
        f"cannot use report.retry_min {format_seconds(report.retry_min)}: it is longer than"
        f" report.retry_max, {format_seconds(report.retry_max)}"
    ]


def _link_warnings(name: str, link: LinkConfig) -> list[str]:
    warnings = []
    if link.heartbeat_interval >= _OFFLINE_AFTER_S:
        warnings.append(
            f"{name}.heartbeat_interval is {format_seconds(link.heartbeat_interval)}: a scheduler"
            f" takes a worker for offline after {format_seconds(_OFFLINE_AFTER_S)}"
        )
    open_to_all = any(ipaddress.ip_network(text).prefixlen == 0 for text in link.allow_networks)
    listens_wide = link.listen is not None and not is_loopback(parse_address(link.listen).host)
    if listens_wide and open_to_all and link.token_file is None and link.tls_client_ca is None:
        warnings.append(
            f"{name}.allow_networks holds every address and there is no {name}.token_file:"
            f" whoever reaches {link.listen} can run commands here"
        )
    return warnings


def _report_warnings(report: ReportConfig) -> list[str]:
    if report.excerpt < _MESSAGE_COLUMN_BYTES - 1024:
        return []
    return [
        f"report.excerpt is {format_bytes(report.excerpt)}: the scheduler stores"
        f" {_MESSAGE_COLUMN_BYTES} bytes of a message"
    ]
