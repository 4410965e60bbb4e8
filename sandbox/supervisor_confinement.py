"""What the supervisor gives up for good once its spawner runs.

A service's unit cannot take these away: the spawner, and so the tasks, would inherit it. The
supervisor needs nothing of the kind: it serves sockets and writes its journal.
"""

from __future__ import annotations

import logging
import os

from stockade.platform import prctl, seccomp
from stockade.platform.errors import SyscallError
from stockade.sandbox import seccomp_policy

log = logging.getLogger(__name__)


def give_up_capabilities() -> None:
    """The bounding set becomes empty; what is in force goes with the change of user.

    Raises:
        SyscallError: this process lacks CAP_SETPCAP.
    """
    prctl.empty_bounding_set()


def confine() -> None:
    """No privileges by any execve, and only the system calls of its policy.

    It holds for all that this process becomes or starts, and each life after a reload has it from
    the one before: call it once. Where the kernel or the machine has no such filter, the log says.
    """
    prctl.set_no_new_privs()
    try:
        seccomp.install(seccomp.compile_filter(seccomp_policy.supervisor(), os.uname().machine))
    except (SyscallError, ValueError) as error:
        log.warning("the supervisor's system calls are not filtered: %s", error)
