"""Guesses what a misspelt name was meant to be, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name``, which may be anything of any length, most looks like."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.6)
    return near[0] if near else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown NAME": the nearest known name, or all of a short list."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"; did you mean {near}?"
    # A hundred names help nobody; a dozen do.
    return f"; known are {', '.join(names)}" if len(names) <= 20 else ""
