"""The figures as pictures, each as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from results import Plot, Results, Row, Topic

FORMATS: Final = ("svg", "png")
OURS: Final = "#1b6ca8"
OTHERS: Final = "#9aa5b1"


def draw(results: Results, directory: Path) -> dict[str, list[str]]:
    """Draws every plot of a run; the names of the SVG files, by topic.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same figures give the same files.
    mpl.rcParams["svg.hashsalt"] = "stockade"
    names: dict[str, list[str]] = {}
    for topic in results.topics:
        for number, plot in enumerate(topic.plots, 1):
            name = f"{results.name}-{topic.name}-{number}"
            if _draw(topic, plot, directory / name):
                names.setdefault(topic.name, []).append(f"{name}.svg")
    return names


def _draw(topic: Topic, plot: Plot, path: Path) -> bool:
    from matplotlib.figure import Figure

    tables = {
        section: [row for row in rows if plot.column in row.figures]
        for section, rows in topic.sections().items()
        if section in plot.sections
    }
    rows = [row for some in tables.values() for row in some]
    if not rows:
        return False
    as_lines = all(row.way.isdigit() for row in rows)
    bars = len(rows) + len(tables)
    figure = Figure(figsize=(8, 4.5 if as_lines else 1.2 + 0.24 * bars), layout="constrained")
    axes = figure.add_subplot()
    (_lines if as_lines else _bars)(axes, tables, plot.column)
    axes.set_title(plot.title)
    for kind in FORMATS:
        # Without the date: the same figures give the same files.
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(f"{path}.{kind}", dpi=110, metadata=metadata)
    return True


def _lines(axes: Any, tables: dict[str, list[Row]], column: str) -> None:
    for section, rows in tables.items():
        points = [(int(row.way), row.figures[column]) for row in rows]
        axes.plot(*zip(*points, strict=True), marker="o", label=section)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N")
    axes.set_ylabel(column)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _bars(axes: Any, tables: dict[str, list[Row]], column: str) -> None:
    """A group of bars for each table; logarithmic when they are far apart."""
    labels: list[str] = []
    values: list[float] = []
    for section, rows in tables.items():
        labels += [section, *(row.way for row in rows)]
        values += [0.0, *(row.figures[column] for row in rows)]
    colours = [OURS if label.startswith(("Stockade", "its ")) else OTHERS for label in labels]
    bars = axes.barh(range(len(labels)), values, color=colours)
    axes.bar_label(bars, [f"{value:,.3g}" if value else "" for value in values], padding=3)
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
        tick.set_fontweight("bold" if label in tables else "normal")
    axes.invert_yaxis()
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 50 * min(positive):
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel(column)
    axes.spines[["top", "right"]].set_visible(False)
