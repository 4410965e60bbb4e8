"""Puts the figures of a run into docs/benchmarks.md, between two marks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from results import Results
from tables import as_markdown

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- figures: benchmarks/run --publish writes what follows -->"
END: Final = "<!-- end of figures -->"


def publish(
    results: Results, pictures: dict[str, list[str]], directory: Path, document: Path = DOCUMENT
) -> None:
    """Replaces what is between the marks.

    Args:
        results: the run.
        pictures: file names of its plots in ``directory``, by topic.
        directory: where its files are.
        document: whose marks.

    Raises:
        ValueError: it has none.
    """
    text = document.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"cannot publish: {document.name} lacks the line {BEGIN!r} or {END!r}")
    place = os.path.relpath(directory, document.parent)
    addresses = {topic: [f"{place}/{name}" for name in names] for topic, names in pictures.items()}
    lines = "\n".join(as_markdown(results, addresses))
    document.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}")
