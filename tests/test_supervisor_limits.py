import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.sandbox.limits import MIB, Limits, Unit
from stockade.supervisor.errors import RejectedError, Rejection
from stockade.supervisor.limits import (
    LIMIT_FIELDS,
    UNLIMITED,
    effective,
    format_limit,
    format_seconds,
    is_looser,
    parse_bytes,
    parse_limit,
    parse_quota,
    parse_seconds,
)
from stockade.supervisor.quantities import MAX_BYTES, MAX_SECONDS, parse_count

BASE = Limits()
SMALL_CAP = dataclasses.replace(BASE, runtime_max=None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64M", 64 * MIB),
        ("64m", 64 * MIB),
        ("64MiB", 64 * MIB),
        (" 1.5 G ", 3 * 512 * MIB),
        ("0", 0),
        ("1000", 1000),
        ("12B", 12),
        ("7E", 7 * 1024**6),
        ("infinity", None),
        (67108864, 64 * MIB),
        (67108864.0, 64 * MIB),
        (math.inf, None),
    ],
)
def test_a_size_is_read_from_a_text_or_a_number(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0),
        ("5s", 5.0),
        ("2min", 120.0),
        ("1h 30min", 5400.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("0.1s", 0.1),
        ("1w", 604800.0),
        ("0", 0.0),
        ("infinity", None),
        (5, 5.0),
        (0.25, 0.25),
    ],
)
def test_a_time_is_read_from_a_text_or_a_number(text, value):
    assert parse_seconds(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("50%", 0.5), ("200 %", 2.0), ("12.5%", 0.125), ("infinity", None), (0.5, 0.5), (2, 2.0)],
)
def test_a_quota_is_read_from_a_percentage_or_a_number_of_cpus(text, value):
    assert parse_quota(text) == value


def test_a_quota_text_without_percent_sign_is_refused_as_it_could_mean_50_cpus():
    with pytest.raises(ValueError, match='"50" is not a quota such as "50%"'):
        parse_quota("50")


HOSTILE = [
    "", " ", "x", "-1", "-5s", "1e9", "0x10", "nan", "inf", "1_000", "\u0661", "5 M M", "M", "%",
    "5parsec", "5s5", "1" * 5000, "9" * 20 + "E", "5\n\x00", float("nan"), -1, -0.5, -math.inf,
    True, False, None, [], {}, [5], {"a": 1}, b"5", object(), 10**400, -(10**400), "64MB",
]  # fmt: skip


@pytest.mark.parametrize("parse", [parse_bytes, parse_quota, parse_seconds, parse_count])
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_what_is_no_quantity_is_refused_with_a_short_reason(parse, value):
    with pytest.raises(ValueError, match="is not a") as caught:
        parse(value)
    assert len(str(caught.value)) < 120


def quantities(name):
    field = LIMIT_FIELDS[name]
    if field.metadata["unit"] is Unit.CHOICE:
        return st.sampled_from(field.metadata["choices"])
    largest = {
        Unit.BYTES: st.integers(MIB, MAX_BYTES),
        Unit.COUNT: st.integers(16, MAX_BYTES),
        Unit.WEIGHT: st.integers(1, 10_000),
        Unit.CPUS: st.floats(0.01, 1e6).map(lambda cpus: round(cpus, 6)),
        Unit.SECONDS: st.floats(0.001, MAX_SECONDS).map(lambda seconds: round(seconds, 6)),
    }
    return st.none() | largest[field.metadata["unit"]]


@settings(deadline=None)
@given(st.data())
def test_format_and_parse_are_inverse_for_every_limit(data):
    for name in LIMIT_FIELDS:
        value = data.draw(quantities(name))
        assert parse_limit(name, format_limit(name, value)) == value


@settings(deadline=None)
@given(st.data())
def test_what_was_parsed_formats_and_parses_to_itself(data):
    text = data.draw(st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,9})?(us|ms|s|min|h)", fullmatch=True))
    seconds = parse_seconds(text)
    assert parse_seconds(format_seconds(seconds)) == seconds


@settings(deadline=None)
@given(
    st.text(max_size=200) | st.floats() | st.integers() | st.none() | st.lists(st.integers()),
    st.sampled_from(sorted(LIMIT_FIELDS)),
)
def test_any_value_is_either_read_or_a_value_error(value, name):
    try:
        parsed = parse_limit(name, value)
    except ValueError:
        return
    assert parse_limit(name, format_limit(name, parsed)) == parsed


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_max", 256 * MIB, "256M"),
        ("memory_swap_max", 0, "0"),
        ("output_max", 1000, "1000"),
        ("cpu_quota", 0.5, "50%"),
        ("cpu_quota", 0.07, "7%"),
        ("runtime_max", 300.0, "5min"),
        ("runtime_max", 90.0, "90s"),
        ("timeout_stop", 0.5, "0.5s"),
        ("tasks_max", None, "infinity"),
        ("oom_policy", "kill", "kill"),
    ],
)
def test_limits_are_written_as_people_write_them(name, value, text):
    assert format_limit(name, value) == text


def test_every_limit_has_a_unit_that_can_be_read_and_written():
    for name, field in LIMIT_FIELDS.items():
        assert parse_limit(name, format_limit(name, field.default)) == field.default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_max", 0),
        ("memory_max", "64K"),
        ("cpu_quota", "0.5%"),
        ("tasks_max", 0),
        ("cpu_weight", 0),
        ("cpu_weight", 10_001),
        ("runtime_max", 0),
        ("oom_policy", "ignore"),
        ("oom_policy", None),
        ("oom_policy", ["kill"]),
    ],
)
def test_a_value_that_no_task_could_run_with_is_refused(name, value):
    with pytest.raises(ValueError, match=r"least|weight|not one of"):
        parse_limit(name, value)


def test_an_unknown_limit_names_the_nearest_one():
    with pytest.raises(ValueError, match="did you mean memory_max"):
        parse_limit("memroy_max", 1)


def test_without_wishes_a_task_gets_the_workers_defaults():
    assert effective(BASE, SMALL_CAP, {}, None) == (BASE, ())


def test_a_tighter_wish_is_granted_without_a_note():
    granted, notes = effective(BASE, SMALL_CAP, {"memory_max": "64M", "cpu_quota": "50%"}, None)
    assert (granted.memory_max, granted.cpu_quota, notes) == (64 * MIB, 0.5, ())


@pytest.mark.parametrize(
    ("name", "wish", "granted", "least"),
    [
        ("memory_max", "2G", 256 * MIB, "256M"),
        ("memory_swap_max", "infinity", 0, "0"),
        # No maximum is set: the kernel's default is it.
        ("cpu_weight", 10_000, 100, "100"),
    ],
)
def test_a_wish_beyond_the_maximum_is_lowered_and_noted(name, wish, granted, least):
    limits, notes = effective(BASE, SMALL_CAP, {name: wish}, None)
    assert getattr(limits, name) == granted
    assert notes == (f"{name} lowered from {wish} to {least}, the worker's maximum",)


def test_oom_policy_continue_counts_as_looser_than_kill():
    granted, notes = effective(BASE, SMALL_CAP, {"oom_policy": "continue"}, None)
    assert granted.oom_policy == "kill"
    assert len(notes) == 1
    granted, notes = effective(BASE, UNLIMITED, {"oom_policy": "continue"}, None)
    assert (granted.oom_policy, notes) == ("continue", ())


@pytest.mark.parametrize("timeout_s", [None, 0, -1, -(2**40), float("nan")])
def test_a_timeout_that_is_missing_or_not_positive_means_the_default(timeout_s):
    assert effective(BASE, SMALL_CAP, {}, timeout_s)[0].runtime_max == 300


def test_a_timeout_sets_runtime_max_beyond_the_default():
    assert effective(BASE, SMALL_CAP, {}, 3600)[0].runtime_max == 3600


def test_a_timeout_beyond_the_maximum_is_lowered():
    cap = dataclasses.replace(BASE, runtime_max=60.0)
    granted, notes = effective(dataclasses.replace(BASE, runtime_max=10.0), cap, {}, 7200)
    assert granted.runtime_max == 60
    assert notes == ("runtime_max lowered from 2h to 1min, the worker's maximum",)


def test_the_largest_timeout_on_the_wire_is_a_time():
    assert effective(BASE, SMALL_CAP, {}, 2**63)[0].runtime_max == MAX_SECONDS


@pytest.mark.parametrize(("wish", "timeout_s"), [("5s", 20), ("20s", 5), ("infinity", 5)])
def test_of_timeout_and_runtime_max_the_shorter_one_holds(wish, timeout_s):
    granted, notes = effective(BASE, SMALL_CAP, {"runtime_max": wish}, timeout_s)
    assert (granted.runtime_max, notes) == (5, ())


def test_the_grace_is_never_longer_than_the_run():
    granted, notes = effective(BASE, SMALL_CAP, {}, 2)
    assert (granted.runtime_max, granted.timeout_stop, notes) == (2, 2, ())


def test_a_wish_for_a_grace_longer_than_the_run_is_lowered_and_noted():
    granted, notes = effective(BASE, SMALL_CAP, {"timeout_stop": "4s"}, 2)
    assert granted.timeout_stop == 2
    assert notes == ("timeout_stop lowered from 4s to 2s, its runtime_max",)


def test_a_task_that_could_never_be_killed_is_refused():
    with pytest.raises(RejectedError, match="ignores SIGTERM") as caught:
        effective(BASE, UNLIMITED, {"timeout_stop": "infinity", "runtime_max": "infinity"}, None)
    assert caught.value.rejection is Rejection.INVALID


@pytest.mark.parametrize(
    "wishes", [{"memroy_max": 1}, {"memory_max": "lots"}, {"memory_max": {}}, {"": 1}, {"x\0": 1}]
)
def test_an_unknown_limit_or_a_bad_value_is_rejected_as_invalid(wishes):
    with pytest.raises(RejectedError, match=r"^cannot use ") as caught:
        effective(BASE, SMALL_CAP, wishes, None)
    assert caught.value.rejection is Rejection.INVALID


def test_a_null_wish_is_no_wish():
    assert effective(BASE, SMALL_CAP, {"memory_max": None}, None) == (BASE, ())


@settings(deadline=None)
@given(st.data())
def test_no_wish_ever_loosens_a_limit_past_the_maximum(data):
    cap = Limits(**{name: data.draw(quantities(name)) for name in LIMIT_FIELDS})
    base = Limits(
        **{
            name: getattr(cap if is_looser(name, field.default, getattr(cap, name)) else BASE, name)
            for name, field in LIMIT_FIELDS.items()
        }
    )
    wishes = {
        name: format_limit(name, data.draw(quantities(name)))
        for name in data.draw(st.sets(st.sampled_from(sorted(LIMIT_FIELDS))))
    }
    try:
        granted, _ = effective(base, cap, wishes, data.draw(st.none() | st.floats(-1, 1e12)))
    except RejectedError:
        assert (base.timeout_stop, cap.timeout_stop) != (5.0, 5.0)
        return
    for name in LIMIT_FIELDS:
        assert not is_looser(name, getattr(granted, name), getattr(cap, name)), name


@settings(deadline=None)
@given(st.data())
def test_an_unlimited_maximum_lowers_no_wish(data):
    wishes = {name: data.draw(quantities(name)) for name in LIMIT_FIELDS if name != "timeout_stop"}
    texts = {name: format_limit(name, value) for name, value in wishes.items()}
    granted, notes = effective(BASE, UNLIMITED, {**texts, "timeout_stop": 0}, None)
    assert notes == ()
    assert dataclasses.asdict(granted) == {**wishes, "timeout_stop": 0}
