"""Puts the figures of a run into docs/benchmarks.md and the README, between two marks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from results import Results
from tables import as_markdown, as_pictures

Lines = Callable[[Results, dict[str, list[str]]], Iterable[str]]

_TOP: Final = Path(__file__).resolve().parent.parent
DOCUMENTS: Final[dict[Path, Lines]] = {
    _TOP / "docs" / "benchmarks.md": as_markdown,
    _TOP / "README.md": as_pictures,
}
BEGIN: Final = "<!-- figures: benchmarks/run --publish writes what follows -->"
END: Final = "<!-- end of figures -->"


def publish(
    results: Results, pictures: dict[str, list[str]], directory: Path, document: Path, lines: Lines
) -> None:
    """Replaces what is between the marks.

    Args:
        results: the run.
        pictures: file names of its plots in ``directory``, by topic.
        directory: where its files are.
        document: whose marks.
        lines: what it shows of the run.

    Raises:
        ValueError: it has no marks.
    """
    text = document.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"cannot publish: {document.name} lacks the line {BEGIN!r} or {END!r}")
    place = os.path.relpath(directory, document.parent)
    addresses = {topic: [f"{place}/{name}" for name in names] for topic, names in pictures.items()}
    shown = "\n".join(lines(results, addresses))
    document.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}")
