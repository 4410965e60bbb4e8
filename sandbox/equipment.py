"""What a spawner works with, found and set up once at its start."""

from __future__ import annotations

import dataclasses
import functools

from stockade.sandbox import capabilities
from stockade.sandbox.children import Children
from stockade.sandbox.confiner import Confiner
from stockade.sandbox.delegation import find_delegation
from stockade.sandbox.limits import Limits
from stockade.sandbox.loop import Loop
from stockade.sandbox.places import Places
from stockade.sandbox.profiles import Profile
from stockade.sandbox.settings import SpawnerSettings
from stockade.sandbox.tree import Tree
from stockade.sandbox.uids import UidPool


class Equipment:
    """One spawner's.

    Attributes:
        generation: the spawner's own.
        tree: the worker's cgroups; None on a host that cannot kill by them.
        controllers: what the tree can limit and count.
        host: what this host can enforce, as it was found and as the tree then came out.
        uids: for slots; None without root.

    Raises:
        StockadeError: something cannot be set up.
    """

    def __init__(self, settings: SpawnerSettings, places: Places, generation: int) -> None:
        self.settings = settings
        self.places = places
        self.generation = generation
        self.loop = Loop()
        self.children = Children(self.loop)
        delegation = find_delegation()
        host = capabilities.probe(places.work_path, delegation)
        self.tree: Tree | None = None
        if host.cgroup_kill:
            self.tree = Tree.set_up(delegation, settings.worker_id, settings.ceilings, host.disk)
        self.controllers = self.tree.controllers if self.tree is not None else frozenset[str]()
        lacks = self.tree.lacks if self.tree is not None else host.lacks
        self.host = dataclasses.replace(host, controllers=self.controllers, lacks=lacks)
        self._degraded = functools.lru_cache(maxsize=64)(
            lambda profile, limits: capabilities.features(profile, limits, self.host, settings.view)
        )
        try:
            self.uids = UidPool(settings.uid_min, settings.uid_max) if host.root else None
            self.confiner = Confiner(settings.view, self.host, places.work_path)
        except BaseException:
            # Another spawner's, which lives, stays.
            if self.tree is not None and self.tree.is_new:
                self.tree.remove()
            raise

    def degraded(self, profile: Profile, limits: Limits) -> tuple[str, ...]:
        """What this host cannot enforce of a task's profile and limits."""
        return self._degraded(profile, limits)
