"""The kinds of files in a cgroup v2 group: cgroupspy's interfaces, typed, and v2's own.

Each is a descriptor: an attribute of a Group that reads and writes one file of it. Reading one that
is absent gives None.
"""

from __future__ import annotations

from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from cgroupspy.interfaces import (
    BaseFileInterface,
    DictFile,
    FlagFile,
    IntegerFile,
    ListFile,
    MultiLineIntegerFile,
)

from stockade.platform.pressure import Pressure, parse_pressure

MAX: Final = "max"

Value = TypeVar("Value")


class Files(Protocol):
    """What has such attributes."""

    def get_property(self, filename: bytes) -> str | None:
        """The file's text, None when it is absent."""

    def set_property(self, filename: bytes, value: Any) -> None:
        """Writes the file."""


class TypedFile(BaseFileInterface, Generic[Value]):  # type: ignore[misc]  # cgroupspy has no types
    """Gives an attribute its type, and None for an absent file."""

    def __get__(self, group: Files, owner: type[Files] | None = None) -> Value | None:
        text = group.get_property(self.filename)
        if text is None:
            return None
        value: Value = self.sanitize_get(text)
        return value

    def __set__(self, group: Files, value: Value) -> None:
        super().__set__(group, value)


class CountFile(TypedFile[int], IntegerFile):  # type: ignore[misc]
    """One whole number."""


class OnOffFile(TypedFile[bool], FlagFile):  # type: ignore[misc]
    """0 or 1."""


class PidsFile(TypedFile[list[int]], MultiLineIntegerFile):  # type: ignore[misc]
    """One process a line."""

    readonly = True


class TableFile(TypedFile[dict[str, int]], DictFile):  # type: ignore[misc]
    """``key number`` a line."""

    readonly = True

    def sanitize_get(self, value: str) -> dict[str, int]:
        return super().sanitize_get(value) if value else {}


class LimitFile(TypedFile[int | Literal["max"]], IntegerFile):  # type: ignore[misc]
    """A number or ``max``."""

    def __set__(self, group: Files, value: int | Literal["max"] | None) -> None:
        group.set_property(self.filename, MAX if value in (None, MAX) else int(value))

    def sanitize_get(self, value: str) -> int | Literal["max"]:
        return MAX if value == MAX else int(value)


class WeightFile(TypedFile[int], IntegerFile):  # type: ignore[misc]
    """``default number``, then perhaps a line a device."""

    def sanitize_get(self, value: str) -> int:
        return int(value.split()[1])

    def sanitize_set(self, value: int) -> str:
        return f"default {int(value)}"


class CpuMax(NamedTuple):
    """CPU time allowed in each period, both in microseconds; ``quota_us`` None means no limit."""

    quota_us: int | None
    period_us: int = 100_000


class BandwidthFile(TypedFile[CpuMax]):
    """``quota period`` or ``max period``."""

    def __set__(self, group: Files, value: tuple[int | None, int]) -> None:
        quota, period = value
        group.set_property(self.filename, f"{MAX if quota is None else int(quota)} {int(period)}")

    def sanitize_get(self, value: str) -> CpuMax:
        quota, period = value.split()
        return CpuMax(None if quota == MAX else int(quota), int(period))


class DeviceTableFile(TypedFile[dict[str, dict[str, int]]]):
    """``MAJOR:MINOR key=number ...`` a line."""

    readonly = True

    def sanitize_get(self, value: str) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        device = ""
        # By words and not by lines: some kernels print a device without numbers and go on with
        # the next one on the same line.
        for word in value.split():
            key, equals, number = word.partition("=")
            if equals:
                table.setdefault(device, {})[key] = int(number)
            else:
                device = word
        return table


class IoMax(NamedTuple):
    """Bytes per second that one device may read and write for the group; None means no limit."""

    device: str
    read_bytes_s: int | None
    write_bytes_s: int | None


class IoMaxFile(TypedFile[dict[str, IoMax]]):
    """``MAJOR:MINOR rbps=N|max wbps=N|max ...`` a line; devices without any limit are not told.

    A write sets the devices that it names and leaves the others as they are.
    """

    def __set__(self, group: Files, value: dict[str, IoMax]) -> None:
        for limits in value.values():
            read, write = (
                MAX if limit is None else int(limit)
                for limit in (limits.read_bytes_s, limits.write_bytes_s)
            )
            group.set_property(self.filename, f"{limits.device} rbps={read} wbps={write}")

    def sanitize_get(self, value: str) -> dict[str, IoMax]:
        found = {}
        for line in value.splitlines():
            device, *words = line.split()
            table = dict(word.split("=", 1) for word in words)
            limits = (None if table[key] == MAX else int(table[key]) for key in ("rbps", "wbps"))
            found[device] = IoMax(device, *limits)
        return found


class PressureFile(TypedFile[Pressure]):
    """Stall times, as /proc/pressure has them for the whole host."""

    readonly = True

    def sanitize_get(self, value: str) -> Pressure:
        return parse_pressure(value)


class NamesFile(TypedFile[frozenset[str]], ListFile):  # type: ignore[misc]
    """Words in one line."""

    def sanitize_get(self, value: str) -> frozenset[str]:
        return frozenset(super().sanitize_get(value))
