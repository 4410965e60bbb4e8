"""Pressure files, and the disk of a path."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from stockade.platform import cgroup, devices
from stockade.platform.errors import SyscallError
from stockade.platform.pressure import Stall, host_pressure, parse_pressure

TEXT = (
    "some avg10=1.50 avg60=0.25 avg300=0.00 total=123456789\n"
    "full avg10=0.50 avg60=0.00 avg300=0.00 total=42\n"
)


def test_both_lines_are_read() -> None:
    found = parse_pressure(TEXT)
    assert found.some == Stall(1.5, 0.25, 0.0, 123456789)
    assert found.full == Stall(0.5, 0.0, 0.0, 42)
    assert parse_pressure(TEXT.splitlines()[0]).full is None


@pytest.mark.parametrize("text", ["", "some avg10=1", "full avg10=0 avg60=0 avg300=0 total=1"])
def test_what_is_no_pressure_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no pressure file"):
        parse_pressure(text)


@pytest.mark.parametrize("resource", ["cpu", "io", "memory"])
def test_the_hosts_pressure_is_what_proc_says(resource: str) -> None:
    if not Path("/proc/pressure").exists():
        assert host_pressure(resource) is None
        return
    before = host_pressure(resource)
    (total,) = re.findall(r"some .*total=(\d+)", Path(f"/proc/pressure/{resource}").read_text())
    after = host_pressure(resource)
    assert before is not None
    assert after is not None
    assert before.some.total_us <= int(total) <= after.some.total_us


def test_a_group_has_pressure_of_its_own() -> None:
    mount = cgroup.find_mount()
    if mount is None or not (mount / "cpu.pressure").exists():
        pytest.skip("no pressure of groups on this host")
    found = cgroup.Group(mount).cpu_pressure
    assert found is not None
    assert found.some.total_us >= 0


def test_a_path_on_a_disk_is_told_by_its_whole_disk() -> None:
    found = devices.disk_of("/")
    number = os.stat("/").st_dev
    if os.major(number) == 0:
        assert found is None
        return
    assert found is not None
    disk = Path("/sys/dev/block", found)
    assert (disk / "queue").is_dir() or not disk.exists()
    assert not (disk / "partition").exists()


def test_a_file_system_without_a_disk_has_none() -> None:
    assert devices.disk_of("/proc") is None


def test_the_disk_of_nothing_is_an_error() -> None:
    with pytest.raises(SyscallError, match="ENOENT"):
        devices.disk_of("/nonexistent")
