"""Sizes, times, quotas and counts as people write them.

Texts are systemd's: sizes ``64M`` (1024-based), times ``1min 30s``, quotas ``50%`` of one CPU, and
``infinity`` for no limit, which is None. Every ``format_*`` is the inverse of its ``parse_*``.
A reason is raised as ValueError without the key's name: whoever knows where the value came from
says so.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeGuard

INFINITY: Final = "infinity"
MAX_BYTES: Final = 2**63 - 1
MAX_SECONDS: Final = 2**31 - 1

# No exponents and few digits: a wish comes from the network, and Fraction("1e999999999") is a bomb.
_NUMBER: Final = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
_SIZE: Final = re.compile(rf"({_NUMBER})\s*(?:([KMGTPE])(?:iB)?|B)?", re.IGNORECASE | re.ASCII)
_SIZE_UNITS: Final = {unit: 1024**power for power, unit in enumerate("KMGTPE", start=1)}
_QUOTA: Final = re.compile(rf"({_NUMBER})\s*%")
_SPAN_PART: Final = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)\s*")
_SPAN_UNITS: Final = {
    word: seconds
    for words, seconds in (
        ("us usec", Fraction(1, 1_000_000)),
        ("ms msec", Fraction(1, 1000)),
        ("s sec second seconds", Fraction(1)),
        ("m min minute minutes", Fraction(60)),
        ("h hr hour hours", Fraction(3600)),
        ("d day days", Fraction(86400)),
        ("w week weeks", Fraction(604800)),
    )
    for word in words.split()
}
_MAX_TEXT: Final = 100
_MAX_CPUS: Final = 1_000_000


def parse_bytes(value: object) -> int | None:
    """A size in bytes from ``64M``, ``1.5G``, ``infinity`` (None) or a whole number.

    Raises:
        ValueError: the reason; nothing but 0 to 2**63 - 1 is a size.
    """
    if is_infinite(value):
        return None
    size: Fraction | None = None
    if isinstance(value, str) and (match := _SIZE.fullmatch(_trim(value))):
        size = Fraction(match[1]) * _SIZE_UNITS.get((match[2] or "").upper(), 1)
    elif _is_number(value) and value == int(value):
        size = Fraction(int(value))
    if size is None or not 0 <= size <= MAX_BYTES:
        raise ValueError(f'{shown(value)} is not a size such as "64M", "1G" or "{INFINITY}"')
    return int(size)


def parse_quota(value: object) -> float | None:
    """A number of CPUs from ``50%`` (of one CPU), ``infinity`` (None) or a number of CPUs.

    A text needs its percent sign: ``50`` could be taken for 50 CPUs, which limits nothing.

    Raises:
        ValueError: the reason.
    """
    if is_infinite(value):
        return None
    cpus: Fraction | None = None
    if isinstance(value, str) and (match := _QUOTA.fullmatch(_trim(value))):
        cpus = Fraction(match[1]) / 100
    elif _is_number(value):
        cpus = Fraction(value)
    if cpus is None or not 0 <= cpus <= _MAX_CPUS:
        raise ValueError(f'{shown(value)} is not a quota such as "50%", "200%" or "{INFINITY}"')
    return _rounded(cpus)


def parse_seconds(value: object) -> float | None:
    """Seconds, to the microsecond, from ``5s``, ``1h 30min``, ``infinity`` (None) or a number.

    A text without a unit is seconds.

    Raises:
        ValueError: the reason; nothing but 0 to 2**31 - 1 seconds is a time.
    """
    if is_infinite(value):
        return None
    seconds: Fraction | None = None
    if isinstance(value, str):
        seconds = _span(_trim(value))
    elif _is_number(value):
        seconds = Fraction(value)
    if seconds is None or not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f'{shown(value)} is not a time such as "5s", "2min" or "{INFINITY}"')
    return _rounded(seconds)


def parse_count(value: object) -> int | None:
    """A whole number from a number, its text, or ``infinity`` (None).

    Raises:
        ValueError: the reason.
    """
    if is_infinite(value):
        return None
    count: int | None = None
    if isinstance(value, str):
        count = int(text) if re.fullmatch(r"[0-9]{1,20}", text := _trim(value)) else None
    elif _is_number(value) and value == int(value):
        count = int(value)
    if count is None or not 0 <= count <= MAX_BYTES:
        raise ValueError(f'{shown(value)} is not a whole number such as 64, or "{INFINITY}"')
    return count


def format_bytes(value: int | None) -> str:
    """The shortest exact text: ``256M``, ``1000``, ``infinity``."""
    if value is None:
        return INFINITY
    for unit, factor in reversed(_SIZE_UNITS.items()):
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def format_quota(value: float | None) -> str:
    """A percentage of one CPU: ``50%``, ``infinity``."""
    return INFINITY if value is None else f"{_plain(Decimal(repr(float(value))) * 100)}%"


def format_seconds(value: float | None) -> str:
    """One number in the largest unit that is exact: ``5min``, ``1.5s``, ``infinity``."""
    if value is None:
        return INFINITY
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if value and value % seconds == 0:
            return f"{int(value // seconds)}{unit}"
    return f"{_plain(Decimal(repr(float(value))))}s"


def format_count(value: int | None) -> str:
    """The number's digits, or ``infinity``."""
    return INFINITY if value is None else str(value)


def is_infinite(value: object) -> bool:
    """Whether a raw value says "no limit": the text ``infinity``, or TOML's ``inf``."""
    if isinstance(value, str):
        return value.strip() == INFINITY
    return isinstance(value, float) and value == math.inf


def _span(text: str) -> Fraction | None:
    if re.fullmatch(_NUMBER, text):
        return Fraction(text)
    total, position = Fraction(0), 0
    while match := _SPAN_PART.match(text, position):
        if match[2] not in _SPAN_UNITS:
            return None
        total += Fraction(match[1]) * _SPAN_UNITS[match[2]]
        position = match.end()
    return total if position and position == len(text) else None


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _trim(text: str) -> str:
    # Longer than any value: cut so that it cannot match.
    return text.strip() if len(text) <= _MAX_TEXT else ""


def shown(value: object) -> str:
    """A raw value for an error message: quoted when a text, and short."""
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _rounded(value: Fraction) -> float:
    return round(float(value), 6)


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
