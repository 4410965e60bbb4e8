"""The figures as text for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from results import COLUMNS, Results, Row, Topic

# What a page shows that has little room.
HEADLINES: Final = ("spawn", "end-to-end")


def _columns(rows: list[Row]) -> list[str]:
    used = {name for row in rows for name in row.figures}
    return [name for name in COLUMNS if name in used]


def _cells(row: Row, columns: list[str]) -> list[str]:
    return [
        f"{row.figures[name]:,.{COLUMNS[name].digits}f}" if name in row.figures else ""
        for name in columns
    ]


def as_text(topic: Topic) -> Iterator[str]:
    """Lines for a terminal."""
    yield f"== {topic.title} ({topic.took_s:.0f} s)"
    for section, rows in topic.sections().items():
        columns = _columns(rows)
        table = [_cells(row, columns) for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *table, strict=True)]
        left = max(len(section), *(len(row.way) for row in rows)) + 2
        yield ""
        yield f"{section:{left}}" + "".join(
            f"  {name:>{width}}" for name, width in zip(columns, widths, strict=True)
        )
        for row, cells in zip(rows, table, strict=True):
            yield f"  {row.way:{left - 2}}" + "".join(
                f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
            )
    for name, reason in topic.skipped.items():
        yield f"skipped: {name}: {reason}"
    yield ""


def as_markdown(results: Results, pictures: dict[str, list[str]]) -> Iterator[str]:
    """Lines for a document.

    Args:
        results: the run.
        pictures: by topic, the addresses of its plots.
    """
    facts = results.facts
    yield f"Taken on {facts['date']} by version {facts['version']}, on this machine:"
    yield ""
    for name, value in facts.items():
        if name not in {"date", "version"}:
            yield f"- {name}: {value}"
    for topic in results.topics:
        yield ""
        yield f"### {topic.title}"
        for address in pictures.get(topic.name, []):
            yield ""
            yield f"![{topic.title}]({address})"
        for section, rows in topic.sections().items():
            columns = _columns(rows)
            yield ""
            yield f"| {section} | " + " | ".join(columns) + " |"
            yield "|---|" + "---:|" * len(columns)
            for row in rows:
                yield f"| {row.way} | " + " | ".join(_cells(row, columns)) + " |"
        if topic.skipped:
            yield ""
        for name, reason in topic.skipped.items():
            yield f"- Skipped: {name}: {reason}"


def as_pictures(results: Results, pictures: dict[str, list[str]]) -> Iterator[str]:
    """Lines for a page that shows no more than the first plots."""
    for topic in results.topics:
        if topic.name in HEADLINES and topic.name in pictures:
            yield f"![{topic.title}]({pictures[topic.name][0]})"
            yield ""
    yield f"Taken on {results.facts['date']} on {results.facts['CPU']}."
