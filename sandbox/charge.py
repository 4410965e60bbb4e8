"""Which spawner is in charge: the one that starts tasks, and inherits from those before it.

At a renewal the charge goes to another spawner, and comes back if that one does not want it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from stockade.sandbox import protocol, recovery
from stockade.sandbox.elders import Elders
from stockade.sandbox.renewal import Renewal
from stockade.sandbox.tasks import Tasks
from stockade.sandbox.telling import Telling

log = logging.getLogger(__name__)


class Charge:
    """This spawner's.

    Attributes:
        elders: spawners before it that still finish their own tasks.
        is_retired: another one is in charge by now; this one only finishes its own tasks.

    Args:
        retire: called when another one has taken over, before the supervisor hears of it.
        changed: called when the last that keeps this spawner may be gone.
    """

    def __init__(
        self, tasks: Tasks, telling: Telling, *,
        retire: Callable[[], None], changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._tasks = tasks
        self._telling = telling
        self._retire = retire
        self._changed = changed
        self._equipment = equipment = tasks.equipment
        self.is_retired = False
        self._renewal: Renewal | None = None
        # The elders that were ours to inherit from before the renewal that is under way.
        self._left: tuple[int, ...] = ()
        self.elders = Elders(equipment.loop, equipment.places, self._elder_died)
        self.elders.find()
        if equipment.uids is not None:
            equipment.uids.before_take = self.elders.look

    @property
    def is_renewing(self) -> bool:
        """Whether another one is just about to take over."""
        return self._renewal is not None

    def _elder_died(self, generation: int) -> None:
        recovery.inherit(self._tasks, self.elders, generation)
        self._changed()

    def renew(self, tuning: str) -> None:
        """Has the installed code take over, and tells the supervisor whether it did."""
        if self._renewal is not None or self.is_retired:
            error = "cannot renew the spawner: it is being done already"
            self._telling.send(protocol.Renewed(error))
            return
        # Ours again if the other one does not want it. Nobody else does while our socket answers.
        # With the charge goes what elders leave: one alone may inherit it.
        self._left = self.elders.leave()
        self._equipment.places.give_up_charge()
        try:
            self._renewal = Renewal(
                self._equipment.loop, self._equipment.children, self._equipment.settings,
                self._equipment.generation + 1, tuning=tuning, done=self._renewed,
            )  # fmt: skip
        except OSError as error:
            self._renewed({"error": str(error)})

    def _renewed(self, answer: dict[str, Any]) -> None:
        self._renewal = None
        if "socket" not in answer:
            self._take_back()
            error = f"cannot renew the spawner: {answer.get('error')}"
            log.error("%s", error)
            self._telling.send(protocol.Renewed(error))
            return
        log.info("another spawner is in charge now: %s", answer["socket"])
        self.is_retired = True
        self._retire()
        self._telling.send(protocol.Renewed(""))
        self._changed()

    def _take_back(self) -> None:
        if not self._equipment.places.take_charge():
            log.error("another spawner has taken charge")
        self.elders.find()
        for generation in set(self._left) - set(self.elders.generations):
            recovery.inherit(self._tasks, self.elders, generation)
