"""Errors of the sandbox layer."""

from __future__ import annotations

import errno
import os
from typing import Final, Self

from stockade.platform.errors import StockadeError, SyscallError

# What mends a step that the kernel refused, where its error number tells.
_MEND: Final = {
    errno.ENOENT: "what read_only_paths and read_write_paths name must be there when it is shown",
    errno.EPERM: "`stockade doctor` says what this host lacks and what mends it",
    errno.EACCES: "`stockade doctor` says what this host lacks and what mends it",
    errno.ENOSYS: "the kernel is too old; `stockade doctor` says what it lacks",
    errno.EROFS: "what is shown must lie where a mount point can be made: not in /proc or /sys",
    errno.ENOMEM: "the host is out of memory",
    errno.ENOSPC: "no room: raise memory_max, half of which the temporary directories may hold, "
    "show fewer paths, or raise the sysctl fs.mount-max or the user.max_ ones",
    errno.EDQUOT: "raise the quota of the worker's user, or choose another state_dir",
    errno.EMFILE: "raise LimitNOFILE= of the worker's unit",
    errno.ENFILE: "raise the sysctl fs.file-max",
    errno.EAGAIN: "the worker's cgroup or user is out of processes: raise TasksMax= of its unit",
}


class SandboxSetupError(StockadeError):
    """A slot, or the spawner itself, could not be set up.

    Attributes:
        step: the name of the step that failed.
        cause: what went wrong, with the hint that mends it.
    """

    def __init__(self, step: str, cause: str) -> None:
        super().__init__(f"cannot {step}: {cause}")
        self.step = step
        self.cause = cause

    @classmethod
    def refused(cls, step: str, error: OSError) -> Self:
        """The kernel refused a step: names the call, the error, and what mends it."""
        text = str(error)
        if not isinstance(error, SyscallError) and error.errno is not None:
            name = errno.errorcode.get(error.errno, str(error.errno))
            where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            text = f"{where}{name} ({os.strerror(error.errno)})"
        hint = _MEND.get(error.errno or 0)
        return cls(step, f"{text}; {hint}" if hint else text)


class UnsupportedError(StockadeError):
    """This host lacks what a feature needs.

    Attributes:
        feature: the feature asked for.
        needs: what the host would have to offer.
    """

    def __init__(self, feature: str, needs: str) -> None:
        super().__init__(f"cannot enforce {feature}: {needs}")
        self.feature = feature
        self.needs = needs


class ProtocolError(StockadeError):
    """A peer (supervisor, spawner or launcher) sent what the protocol does not allow."""


class ContainerRefusedError(StockadeError):
    """A container task asks for what it may not have, or for nothing that could be run."""


class NoEngineError(ContainerRefusedError):
    """This worker runs no containers."""
