from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.supervisor.excerpt import LEAST_ROOM_BYTES, MARKER_FORM, excerpt

# Text with characters of one to four bytes, and bytes that are no text at all.
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=300).map(str.encode)
outputs = st.lists(st.one_of(texts, st.binary(max_size=300)), max_size=4).map(b"".join)


def cleaned(data: bytes) -> str:
    return data.decode(errors="replace").replace("\0", "\ufffd")


@settings(deadline=None)
@given(outputs, st.integers(0, 1300), st.integers(0, 600), st.integers(0, 10**12))
def test_any_bytes_give_valid_text_within_the_limit(
    data: bytes, split: int, limit: int, missing: int
) -> None:
    text = excerpt(data[:split], data[split:], len(data) + missing, limit)
    assert len(text.encode("utf-8", "strict")) <= limit
    assert "\0" not in text


@pytest.mark.parametrize("missing", [0, 1000])
def test_bytes_that_are_no_text_and_so_grow_stay_within_the_limit(missing: int) -> None:
    for limit in range(300):
        text = excerpt(b"\xff" * 200, b"\xff" * 200, 400 + missing, limit)
        assert limit - 8 < len(text.encode()) <= limit


@settings(deadline=None)
@given(outputs, st.integers(0, 1300))
def test_what_fits_is_kept_whole(data: bytes, split: int) -> None:
    text = excerpt(data[:split], data[split:], len(data), len(cleaned(data).encode()))
    assert text == cleaned(data)


@settings(deadline=None)
@given(outputs, st.integers(0, 1300), st.integers(60, 600))
def test_what_does_not_fit_keeps_both_ends(data: bytes, split: int, limit: int) -> None:
    text = excerpt(data[:split], data[split:], len(data), limit)
    whole = cleaned(data)
    if len(whole.encode()) <= limit:
        return
    marker = MARKER_FORM.format(total=len(data))
    # The output might contain the marker's text; the real one leaves room for both ends.
    position = text.index(marker)
    first, last = text[:position], text[position + len(marker) :]
    assert first
    assert last
    assert whole.startswith(first)
    # Where the cut falls into bytes that are no text, one replacement may stand for part of them.
    assert whole.endswith(last.lstrip("\ufffd"))
    room = limit - len(marker)
    assert len(text.encode()) > limit - 8
    assert len(first.encode()) > room // 2 - 4


@settings(deadline=None)
@given(texts, texts, st.integers(1, 10**9), st.integers(60, 2500))
def test_a_gap_is_marked_even_when_the_rest_fits(
    head: bytes, tail: bytes, missing: int, limit: int
) -> None:
    total = len(head) + len(tail) + missing
    text = excerpt(head, tail, total, limit)
    marker = MARKER_FORM.format(total=total)
    assert marker in text
    if len((cleaned(head) + marker + cleaned(tail)).encode()) <= limit:
        assert text == cleaned(head) + marker + cleaned(tail)


def test_a_character_is_never_split() -> None:
    data = "ü€😀".encode() * 500
    for limit in range(40, 140):
        text = excerpt(data, b"", len(data), limit)
        assert "\ufffd" not in text
        assert set(text.replace(MARKER_FORM.format(total=len(data)), "")) <= set("ü€😀")


def test_a_character_across_head_and_tail_is_kept() -> None:
    data = "€".encode()
    assert excerpt(data[:1], data[1:], 3, 100) == "€"


def test_a_short_end_leaves_its_room_to_the_other() -> None:
    text = excerpt(b"ab", b"z" * 1000, 10**6, 200)
    assert text.startswith("ab\n[... cut: 1000000 bytes in all ...]\n")
    assert len(text) == 200


def test_a_limit_without_room_for_the_marker_gives_the_end() -> None:
    limit = len(MARKER_FORM.format(total=100)) + LEAST_ROOM_BYTES - 1
    assert excerpt(b"a" * 50, b"z" * 50, 100, limit) == "z" * limit
    assert excerpt(b"a" * 50, b"z" * 50, 100, limit + 1).startswith("aaaa\n[")
    assert excerpt(b"a" * 100, b"", 100, 3) == "aaa"
    assert excerpt(b"ab", b"", 100, 1) == "b"
    assert excerpt(b"ab", b"yz", 100, 1) == "z"
    assert excerpt(b"a", b"", 1, 0) == ""


def test_one_line_of_five_megabytes_is_cut_in_linear_time() -> None:
    data = b"x" * 5_000_000
    assert len(excerpt(data, b"", len(data), 1024)) == 1024
