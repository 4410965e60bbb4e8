"""Spawners of earlier generations that still finish their own tasks beside the one in charge."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable

from stockade.platform import pidfd
from stockade.platform.errors import SyscallError
from stockade.sandbox.loop import Loop
from stockade.sandbox.places import Places

log = logging.getLogger(__name__)


class Elders:
    """Watches them: the tasks of one that dies are the successor's, the one in charge.

    Args:
        died: called with the generation of one that is gone.
    """

    def __init__(self, loop: Loop, places: Places, died: Callable[[int], None]) -> None:
        self._loop = loop
        self._places = places
        self._died = died
        self._pidfds: dict[int, int] = {}

    @property
    def generations(self) -> tuple[int, ...]:
        """Those that live."""
        return tuple(sorted(self._pidfds))

    def find(self) -> None:
        """Finds all that live now, and watches them."""
        for generation, pid in self._places.other_generations().items():
            try:
                fd = pidfd.open_pidfd(pid)
            except SyscallError:
                continue
            # The lock ends with its process: while it is there, the number was that process's.
            if self._places.other_generations().get(generation) != pid:
                os.close(fd)
                continue
            self._pidfds[generation] = fd
            self._loop.watch(fd, select.EPOLLIN, lambda _events, each=generation: self._gone(each))  # type: ignore[misc]

    def look(self) -> None:
        """Takes note of those that are dead already, before anybody uses what was theirs."""
        for generation, fd in list(self._pidfds.items()):
            if pidfd.has_ended(fd):
                self._gone(generation)

    def leave(self) -> tuple[int, ...]:
        """Watches them no more: they are another one's to inherit from. Says who they were."""
        left = self.generations
        for fd in self._pidfds.values():
            self._loop.unwatch(fd)
            os.close(fd)
        self._pidfds.clear()
        return left

    def _gone(self, generation: int) -> None:
        fd = self._pidfds.pop(generation, None)
        if fd is None:
            return
        self._loop.unwatch(fd)
        os.close(fd)
        log.info("the spawner of generation %d has ended", generation)
        self._died(generation)
