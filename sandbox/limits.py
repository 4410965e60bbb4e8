"""The table of limits: each is declared here once, with its unit, default and bounds.

Names are systemd.exec(5)'s and systemd.resource-control(5)'s in snake case. Parsing texts such as
``64M`` and merging with configuration is the supervisor's; enforcing is the plan's.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final, Self

MIB: Final = 1024 * 1024


class Unit(enum.Enum):
    """What a limit's number means, and so how its text is read and written."""

    BYTES = "bytes"
    CPUS = "CPUs"
    SECONDS = "seconds"
    COUNT = "count"
    WEIGHT = "weight"
    CHOICE = "choice"


def _limit(
    unit: Unit, default: Any, text: str, *, least: float = 0, choices: tuple[str, ...] = (),
    controller: str = "", instead: str = "",
) -> Any:  # fmt: skip
    """One limit.

    Args:
        unit: of its values.
        default: what holds when nobody says otherwise.
        text: the help.
        least: below it the kernel refuses the value, or no task could so much as start.
        choices: of a CHOICE, from the strictest on.
        controller: the cgroup controller that holds it, if one does.
        instead: what is done on a host without that.
    """
    metadata = {
        "unit": unit, "help": text, "least": least, "choices": choices,
        "controller": controller, "instead": instead,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one task. ``None`` means no limit (``infinity`` in texts).

    Sizes are bytes, times are seconds, ``cpu_quota`` is a number of CPUs (0.5 is written ``50%``),
    weights are 1 to 10000.
    """

    memory_max: int | None = _limit(
        Unit.BYTES, 256 * MIB, "most memory; past it the task is killed", least=MIB,
        controller="memory",
        instead="a watchdog samples the task's processes and kills at the limit",
    )  # fmt: skip
    memory_high: int | None = _limit(
        Unit.BYTES, None, "memory above which the task is slowed", least=MIB,
        controller="memory", instead="nothing",
    )  # fmt: skip
    memory_swap_max: int | None = _limit(
        Unit.BYTES, 0, "most swap", controller="memory", instead="nothing"
    )
    # cpu.max takes no less than 1 ms in 100 ms.
    cpu_quota: float | None = _limit(
        Unit.CPUS, None, "CPU time per time, 100% is one CPU", least=0.01,
        controller="cpu", instead="nothing",
    )  # fmt: skip
    cpu_weight: int | None = _limit(
        Unit.WEIGHT, None, "share of CPU against other tasks", least=1,
        controller="cpu", instead="nothing",
    )  # fmt: skip
    tasks_max: int | None = _limit(
        Unit.COUNT, 512, "most processes and threads", least=1,
        controller="pids", instead="RLIMIT_NPROC of the task's uid",
    )  # fmt: skip
    io_weight: int | None = _limit(
        Unit.WEIGHT, None, "share of disk I/O against other tasks", least=1,
        controller="io", instead="nothing",
    )  # fmt: skip
    io_read_bandwidth_max: int | None = _limit(
        Unit.BYTES, None, "most bytes a second read from the work directory's disk", least=1024,
        controller="io", instead="nothing",
    )  # fmt: skip
    io_write_bandwidth_max: int | None = _limit(
        Unit.BYTES, None, "most bytes a second written to the work directory's disk", least=1024,
        controller="io", instead="nothing",
    )  # fmt: skip
    runtime_max: float | None = _limit(
        Unit.SECONDS, 300.0, "longest run, counted from the start", least=0.001
    )
    timeout_stop: float | None = _limit(Unit.SECONDS, 5.0, "grace between SIGTERM and SIGKILL")
    oom_policy: str = _limit(
        Unit.CHOICE,
        "kill",
        "on out of memory: kill the task or continue",
        choices=("kill", "continue"),
        controller="memory",
    )
    limit_nofile: int | None = _limit(Unit.COUNT, 65536, "most open files per process", least=16)
    # 1 and not 0: with a piped core_pattern 0 still starts the helper (core(5)), 1 stops both.
    limit_core: int | None = _limit(Unit.BYTES, 1, "largest core file")
    limit_fsize: int | None = _limit(Unit.BYTES, None, "largest file a process may write")
    workdir_max: int | None = _limit(Unit.BYTES, None, "most bytes in the work directory")
    workdir_inodes_max: int | None = _limit(Unit.COUNT, None, "most files in the work directory")
    output_max: int | None = _limit(Unit.BYTES, 10 * MIB, "output kept, as head and tail")

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for ``json.dumps``; ``from_json`` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """The limits that ``to_json`` gave.

        Raises:
            TypeError: a field is unknown.
        """
        return cls(**fields)


LIMIT_FIELDS: Final = {field.name: field for field in dataclasses.fields(Limits)}


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """What all tasks of a worker together may use, whatever each is allowed. None: no limit.

    Attributes:
        memory_max: bytes.
        cpu_quota: a number of CPUs.
        tasks_max: processes and threads, the launchers' among them.
    """

    memory_max: int | None = None
    cpu_quota: float | None = None
    tasks_max: int | None = None
