"""Whom the kernel's OOM killer takes first: a task, and not the worker."""

from __future__ import annotations

import logging
from typing import Final

from stockade.platform import proc
from stockade.platform.errors import SyscallError

log = logging.getLogger(__name__)

# Not -1000: a worker that leaks must not take the host down with it.
_WORKER: Final = -900
# Above the worker's own where that cannot be lowered: an ordinary user may only raise.
_ABOVE_WORKER: Final = 100
_MOST: Final = 1000


def protect_worker() -> None:
    """Lowers this process's score, which the spawner inherits, unless the unit chose one."""
    if proc.oom_score_adj() != 0:
        return
    try:
        proc.set_oom_score_adj(_WORKER)
    except SyscallError as error:
        log.info("the kernel may kill the worker for memory before others: %s", error)


def of_tasks() -> int:
    """The score that tasks get: the ordinary one below a protected worker, else above the worker's.

    Written with CAP_SYS_RESOURCE it is also the least that a task can set.
    """
    own = proc.oom_score_adj()
    return 0 if own < 0 else min(_MOST, own + _ABOVE_WORKER)
