"""The spawner's event loop."""

from __future__ import annotations

import gc
import os
import select
import weakref

from stockade.sandbox.loop import Loop


class Held:
    """Something that a callback holds."""


def test_timers_run_in_order_and_cancelled_ones_do_not() -> None:
    loop, ran = Loop(), list[str]()
    loop.call_later(0.02, lambda: ran.append("second"))
    loop.call_later(0.01, lambda: ran.append("first"))
    loop.call_later(0.015, lambda: ran.append("never")).cancel()
    loop.call_later(0.03, loop.stop)
    loop.run()
    assert ran == ["first", "second"]


def test_cancelled_deadlines_of_many_tasks_are_not_kept() -> None:
    loop = Loop()
    held = []
    for _ in range(1000):
        thing = Held()
        held.append(weakref.ref(thing))
        loop.call_later(300, lambda thing=thing: None).cancel()  # type: ignore[misc]
    del thing
    gc.collect()
    assert all(one() is None for one in held)
    assert len(loop._timers) < 200


def test_timers_that_are_not_cancelled_outlive_a_clearing_of_the_others() -> None:
    loop, ran = Loop(), list[int]()
    for number in range(500):
        loop.call_later(0.001 * (500 - number), lambda number=number: ran.append(number))  # type: ignore[misc]
        loop.call_later(300, lambda: ran.append(-1)).cancel()
    loop.call_later(0.6, loop.stop)
    loop.run()
    assert ran == list(range(499, -1, -1))


def test_a_timer_cancelled_by_one_that_runs_does_not_run() -> None:
    loop, ran = Loop(), list[str]()
    victim = loop.call_later(0.02, lambda: ran.append("victim"))

    def first() -> None:
        for _ in range(200):
            loop.call_later(300, lambda: None).cancel()
        victim.cancel()
        victim.cancel()

    loop.call_later(0.01, first)
    loop.call_later(0.03, loop.stop)
    loop.run()
    assert ran == []


def test_what_happened_to_a_descriptor_is_not_told_of_the_next_one_with_its_number() -> None:
    loop, stale = Loop(), list[int]()
    pipes = [os.pipe() for _ in range(2)]
    silent, silent_end = os.pipe()

    def first(_events: int) -> None:
        """Both have something to read; whichever is told first puts a silent one in the place."""
        for fd, _ in pipes:
            loop.unwatch(fd)
            os.dup2(silent, fd)
            loop.watch(fd, select.EPOLLIN, stale.append)
        loop.call_later(0.01, loop.stop)

    for fd, write_end in pipes:
        os.write(write_end, b"x")
        loop.watch(fd, select.EPOLLIN, first)
    loop.run()
    for fd in (silent, silent_end, *pipes[0], *pipes[1]):
        os.close(fd)
    assert stale == []
