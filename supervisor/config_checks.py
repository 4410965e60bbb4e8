"""What no single value shows: keys that contradict each other, or that the host contradicts."""

from __future__ import annotations

import ipaddress
import stat
from pathlib import Path
from typing import Final

from stockade.supervisor.config import Config, HttpConfig, ReportConfig, WorkerConfig
from stockade.supervisor.limits import format_bytes, format_seconds
from stockade.supervisor.listen import bind_problems, is_loopback, parse_address

# What the scheduler that this worker is made for does; see docs/configuration.md.
_OFFLINE_AFTER_S: Final = 30.0
_MESSAGE_COLUMN_BYTES: Final = 65_535
_NOBODY: Final = 65_534


def check(config: Config) -> tuple[list[str], list[str]]:
    """Problems, each of which makes the configuration unusable, and warnings; whole sentences."""
    token_problems, token_warnings = _check_token(config.http.token_file)
    problems = [
        *_worker_problems(config.worker),
        *bind_problems(
            listen=config.http.listen,
            advertise=config.http.advertise,
            scheduler=config.http.scheduler,
            token_file=config.http.token_file,
            allow_networks=config.http.allow_networks,
        ),
        *token_problems,
        *_report_problems(config.report),
    ]
    warnings = [
        *_http_warnings(config.http),
        *token_warnings,
        *_report_warnings(config.report),
    ]
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


def _check_token(path: Path | None) -> tuple[list[str], list[str]]:
    if path is None:
        return [], []
    try:
        status = path.stat()
    except OSError as error:
        return [f"cannot read http.token_file {path}: {error.strerror}"], []
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        return [f"cannot use http.token_file {path}: it is empty or not a regular file"], []
    if status.st_mode & stat.S_IROTH:
        return [], [f"http.token_file {path} is readable by everyone; chmod o-r mends that"]
    return [], []


def _report_problems(report: ReportConfig) -> list[str]:
    if report.retry_min <= report.retry_max:
        return []
    return [
        f"cannot use report.retry_min {format_seconds(report.retry_min)}: it is longer than"
        f" report.retry_max, {format_seconds(report.retry_max)}"
    ]


def _http_warnings(http: HttpConfig) -> list[str]:
    warnings = []
    if http.heartbeat_interval >= _OFFLINE_AFTER_S:
        warnings.append(
            f"http.heartbeat_interval is {format_seconds(http.heartbeat_interval)}: a scheduler"
            f" takes a worker for offline after {format_seconds(_OFFLINE_AFTER_S)}"
        )
    open_to_all = any(ipaddress.ip_network(text).prefixlen == 0 for text in http.allow_networks)
    listens_wide = not is_loopback(parse_address(http.listen).host)
    if listens_wide and open_to_all and http.token_file is None:
        warnings.append(
            "http.allow_networks holds every address and there is no http.token_file:"
            f" whoever reaches {http.listen} can run commands here"
        )
    return warnings


def _report_warnings(report: ReportConfig) -> list[str]:
    if report.excerpt < _MESSAGE_COLUMN_BYTES - 1024:
        return []
    return [
        f"report.excerpt is {format_bytes(report.excerpt)}: the scheduler stores"
        f" {_MESSAGE_COLUMN_BYTES} bytes of a message"
    ]
