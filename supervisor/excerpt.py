"""The excerpt of a task's output that a report carries: head and tail, as text."""

from __future__ import annotations

import codecs
from typing import Final

MARKER_FORM: Final = "\n[... cut: {total} bytes in all ...]\n"
# With less than two characters of four bytes beside the marker there are no ends to speak of.
LEAST_ROOM_BYTES: Final = 8

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def excerpt(head: bytes, tail: bytes, total: int, limit_bytes: int) -> str:
    """Text of at most ``limit_bytes`` bytes of UTF-8, for any bytes, that keeps both ends.

    When everything fits it is the whole output. Otherwise its first and its last part stand around
    a marker, each cut between characters. Bytes that are not UTF-8, and NUL, become U+FFFD. When
    the limit leaves no room for the marker, it is the end alone: errors are printed last.

    Args:
        head: the output's first bytes.
        tail: the bytes that follow ``head``, or, when some are missing in between, the last ones.
        total: how many bytes were printed; more than the two hold when some are missing.
        limit_bytes: 0 or more.
    """
    if total <= len(head) + len(tail):
        # Nothing is missing: where the two meet means nothing, either end may reach past it.
        head = tail = head + tail
        # No byte gives less than one byte of text, so what is longer than the limit never fits.
        if total <= limit_bytes:
            whole = _clean(head.decode(errors="replace"))
            if len(whole.encode()) <= limit_bytes:
                return whole
    marker = MARKER_FORM.format(total=total)
    room = limit_bytes - len(marker)
    if room < LEAST_ROOM_BYTES:
        return _last(tail or head, limit_bytes)
    # An end that needs less than half leaves the rest to the other.
    tail_bytes = len(_last(tail, room).encode())
    first = _first(head, max(room // 2, room - tail_bytes))
    return first + marker + _last(tail, room - len(first.encode()))


def _first(data: bytes, limit_bytes: int) -> str:
    """The longest text of the first bytes that fits, without the character cut at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = _clean(decoder.decode(data[:limit_bytes]))
    return text.encode()[:limit_bytes].decode(errors="ignore")


def _last(data: bytes, limit_bytes: int) -> str:
    """The longest text of the last bytes that fits, without the character cut at their start."""
    text = _clean(_whole_start(data[max(0, len(data) - limit_bytes) :]).decode(errors="replace"))
    encoded = text.encode()
    return _whole_start(encoded[max(0, len(encoded) - limit_bytes) :]).decode()


def _whole_start(data: bytes) -> bytes:
    """The bytes without the up to three at their start that continue a character before them."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def _clean(text: str) -> str:
    # NUL is text to JSON, and the end of the text, or an error, to many a scheduler's database.
    return text.replace("\0", _REPLACEMENT)
