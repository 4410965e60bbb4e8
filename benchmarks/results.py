"""What a run has found: rows of figures, by topic, and the machine; written and read as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final, Self


@dataclasses.dataclass(frozen=True)
class Column:
    """What a figure of this name means.

    Attributes:
        digits: after the point, when it is shown.
        claim: a ratio, which carries over to other machines; the rest is this machine's.
        higher_is_better: else lower is.
    """

    digits: int
    claim: bool = False
    higher_is_better: bool = False


COLUMNS: Final = {
    "p50 ms": Column(2),
    "p90 ms": Column(2),
    "p99 ms": Column(2),
    "max ms": Column(1),
    "bare ms": Column(2),
    "ratio": Column(2, claim=True),
    "CPU ms": Column(2),
    "machine ms": Column(2),
    "tasks/s": Column(0, higher_is_better=True),
    "share": Column(2, claim=True, higher_is_better=True),
    "x RQ": Column(2, claim=True, higher_is_better=True),
    "x Celery": Column(2, claim=True, higher_is_better=True),
    "exponent": Column(3, claim=True),
    "supervisor MiB": Column(1),
    "spawner MiB": Column(1),
    "PSS KiB/task": Column(1),
    "Slab KiB/task": Column(1),
    "KernelStack KiB/task": Column(1),
    "PageTables KiB/task": Column(1),
    "descriptors": Column(0),
    "slab MiB": Column(0),
    "PSS MiB": Column(1),
    "MB/s": Column(0, higher_is_better=True),
    "CPU s/GB": Column(2),
    "CPU ms/min": Column(1),
    "wake-ups/min": Column(0),
    "file MiB": Column(0),
    "open ms": Column(1),
    "late p99 ms": Column(0),
    "late max ms": Column(0),
    "bystander max ms": Column(0),
    "n": Column(0, higher_is_better=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        section: the table's heading, such as "start to exit of /bin/true".
        way: whose figures they are; a number is the x of a plot.
        figures: by COLUMNS' names.
    """

    section: str
    way: str
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Plot:
    """One picture: the sections' rows side by side, or as lines over numbers.

    Attributes:
        title: above it.
        column: what is drawn.
        sections: of which tables.
    """

    title: str
    column: str
    sections: tuple[str, ...]


@dataclasses.dataclass
class Topic:
    """What one topic has found.

    Attributes:
        name: as ``--only`` takes it.
        title: for people.
        rows: in the order they are shown.
        skipped: what was not measured, and why.
        plots: the pictures that belong to it.
        took_s: how long it took.
    """

    name: str
    title: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    plots: list[Plot] = dataclasses.field(default_factory=list)
    took_s: float = 0.0

    def add(self, section: str, way: str, **figures: float) -> None:
        self.add_all(section, way, figures)

    def add_all(self, section: str, way: str, figures: dict[str, float]) -> None:
        unknown = figures.keys() - COLUMNS.keys()
        assert not unknown, f"no such columns: {unknown}"
        self.rows.append(Row(section, way, figures))

    def sections(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.section, []).append(row)
        return found


@dataclasses.dataclass
class Results:
    """One run.

    Attributes:
        name: date and what the machine is, never its name.
        facts: about the machine and the versions.
        topics: in the order they ran.
    """

    name: str
    facts: dict[str, Any]
    topics: list[Topic] = dataclasses.field(default_factory=list)

    def write(self, directory: Path) -> Path:
        path = directory / f"{self.name}.json"
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            fields = json.loads(path.read_text())
            topics = [
                Topic(
                    **{
                        **topic,
                        "rows": [Row(**row) for row in topic["rows"]],
                        "plots": [
                            Plot(**{**plot, "sections": tuple(plot["sections"])})
                            for plot in topic["plots"]
                        ],
                    }
                )
                for topic in fields["topics"]
            ]
            return cls(fields["name"], fields["facts"], topics)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"cannot read {path}: not results of benchmarks/run") from error
