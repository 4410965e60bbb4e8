"""What is said when a launcher could not start its task: step, call, error, what mends it."""

from __future__ import annotations

import errno
import os
from typing import Final

from stockade.sandbox.launch_message import Step
from stockade.sandbox.record import FailedLine

# The call that each step makes; see launcher.c.
CALLS: Final[dict[Step, str]] = {
    Step.MESSAGE: "recvmsg",
    Step.CLONE: "clone3",
    Step.SETSID: "setsid",
    Step.NAMESPACE: "unshare(CLONE_NEWCGROUP)",
    Step.STDIO: "dup2",
    Step.RLIMIT: "prlimit",
    Step.GROUPS: "setgroups",
    Step.GID: "setresgid",
    Step.UID: "setresuid",
    Step.CAPABILITIES: "capset",
    Step.PDEATHSIG: "prctl(PR_SET_PDEATHSIG)",
    Step.DIRECTORY: "chdir",
    Step.DESCRIPTORS: "close_range",
    Step.RECORD: "write",
    Step.LANDLOCK: "landlock_restrict_self",
    Step.SECCOMP: "seccomp",
    Step.EXEC: "execve",
}

_SHOW: Final = (
    "the task sees nothing of homes, /run, /tmp and the worker's files but what is shown to it: "
    "name the path in --read-only-paths or --read-write-paths ([profile] read_only_paths, "
    "read_write_paths)"
)
_NO_PROGRAM: Final = "there is no such program, or not the interpreter that it names"
_OUT_OF_PROCESSES: Final = "raise tasks_max, or TasksMax= of the worker's unit"
_NO_MEMORY: Final = "the host is out of memory, or memory_max is too low to start a program"
_KERNEL: Final = "`stockade doctor` says what this kernel lacks"
_USER_NAMESPACE: Final = "is the uid range (uid_min, uid_max) mapped in this user namespace?"

# What mends a step, by its error; 0 for any other error of the step.
_MEND: Final[dict[tuple[Step, int], str]] = {
    (Step.MESSAGE, 0): "spawner and launcher are not of one version: restart the worker",
    (Step.CLONE, errno.EAGAIN): _OUT_OF_PROCESSES,
    (Step.CLONE, errno.ENOMEM): _NO_MEMORY,
    (Step.CLONE, errno.EBUSY): "somebody enabled controllers in the task's cgroup",
    (Step.CLONE, errno.ENOENT): "somebody removed the task's cgroup",
    (Step.NAMESPACE, 0): _KERNEL,
    (Step.RLIMIT, errno.EPERM): "the worker's own hard limit is lower: raise it in its unit "
    "(LimitNOFILE=, LimitCORE=, LimitFSIZE=)",
    (Step.GROUPS, 0): _USER_NAMESPACE,
    (Step.GID, 0): _USER_NAMESPACE,
    (Step.UID, errno.EAGAIN): _OUT_OF_PROCESSES,
    (Step.UID, 0): _USER_NAMESPACE,
    (Step.CAPABILITIES, 0): "the worker must run as real root, or as an ordinary user",
    (Step.DIRECTORY, errno.ENOENT): "there is no such directory",
    (Step.DIRECTORY, errno.ENOTDIR): "it is no directory",
    (Step.DIRECTORY, errno.EACCES): "the task's uid may not enter it: chmod o+x it and those above "
    "it, or choose another working directory",
    (Step.RECORD, errno.ENOSPC): "the file system of runtime_dir is full",
    (Step.LANDLOCK, 0): _KERNEL,
    (Step.SECCOMP, 0): _KERNEL,
    (Step.EXEC, errno.ENOENT): _NO_PROGRAM,
    (Step.EXEC, errno.EACCES): "it is not executable for the task's uid",
    (
        Step.EXEC,
        errno.ENOEXEC,
    ): "no program of this machine's kind, nor a script with #!",
    (Step.EXEC, errno.EAGAIN): _OUT_OF_PROCESSES,
    (Step.EXEC, errno.ENOMEM): _NO_MEMORY,
    (Step.EXEC, errno.E2BIG): "arguments and environment are too long",
}
# Where the task sees mounts of its own, the host's file may be there and still not be found.
_MEND_CONFINED: Final = {
    (Step.DIRECTORY, errno.ENOENT): _SHOW,
    (Step.EXEC, errno.ENOENT): f"{_NO_PROGRAM}; {_SHOW}",
}


def failed_step(failed: FailedLine, *, is_confined: bool) -> str:
    """One line: the step, the call, its error, and what mends it, if there is something to say.

    Args:
        failed: the launcher's words.
        is_confined: the task sees mounts of its own.
    """
    name = errno.errorcode.get(failed.errno, str(failed.errno))
    text = f"cannot start the task: {failed.step}: "
    try:
        step = Step(failed.step)
    except ValueError:
        # Of a launcher of another version.
        return f"{text}{name} ({os.strerror(failed.errno)})"
    hint = _MEND.get((step, failed.errno)) or _MEND.get((step, 0))
    if is_confined:
        hint = _MEND_CONFINED.get((step, failed.errno), hint)
    text += f"{CALLS[step]}: {name} ({os.strerror(failed.errno)})"
    return f"{text}; {hint}" if hint else text
