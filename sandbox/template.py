"""The mount namespace that every confined slot of a worker starts from, made once.

Its mounts are private: what the host mounts later does not appear in it, and what it unmounts stays
in use here until the spawner ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NoReturn

from stockade.platform import clone, namespaces
from stockade.platform.errors import StockadeError, SyscallError
from stockade.sandbox import steps
from stockade.sandbox.errors import SandboxSetupError
from stockade.sandbox.steps import Step

RESOLV_CONF: Final = "/etc/resolv.conf"
_REPORT_BYTES: Final = 4096


def resolv_conf_in_run() -> str | None:
    """What /etc/resolv.conf leads to, when that is a file in /run, which tasks get empty."""
    target = os.path.realpath(RESOLV_CONF)
    return target if target.startswith("/run/") and os.path.isfile(target) else None


class Template:
    """Makes the namespace when first asked for it, and again when resolv.conf is another file."""

    def __init__(self, system: Sequence[Step], resolv_conf: str | None) -> None:
        self._system = system
        self._resolv_conf = resolv_conf
        self._fd = -1
        self._made_with: tuple[int, int] | None = None

    def open(self) -> int:
        """The namespace's descriptor, which stays the template's.

        Raises:
            SandboxSetupError: a step failed.
        """
        now = self._identity()
        if self._fd < 0 or now != self._made_with:
            fd = make_template(self._system)
            self.close()
            self._fd, self._made_with = fd, now
        return self._fd

    def _identity(self) -> tuple[int, int] | None:
        if self._resolv_conf is None:
            return None
        try:
            found = os.stat(self._resolv_conf)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def close(self) -> None:
        """Lets the namespace go; slots that were made from it keep theirs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_template(system: Sequence[Step]) -> int:
    """A mount namespace in which the steps were done; as root.

    Raises:
        SandboxSetupError: a step failed; names it, the call and its error.
    """
    report, theirs = os.pipe2(os.O_CLOEXEC)
    held, hold = os.pipe2(os.O_CLOEXEC)
    try:
        pid, pidfd = clone.clone3(clone.CLONE_NEWNS)
        if pid == 0:
            os.close(hold)
            _make_and_wait(system, theirs, held)
        try:
            os.close(theirs)
            theirs = -1
            said = os.read(report, _REPORT_BYTES)
            if said != b".":
                raise SandboxSetupError("make the private system", said.decode(errors="replace"))
            return namespaces.open_namespace(pid, "mnt")
        finally:
            os.close(hold)
            hold = -1
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
            os.close(pidfd)
    except SyscallError as error:
        raise SandboxSetupError("make the private system", str(error)) from error
    finally:
        for fd in (report, theirs, held, hold):
            if fd >= 0:
                os.close(fd)


def _make_and_wait(system: Sequence[Step], report: int, held: int) -> NoReturn:
    try:
        try:
            os.umask(0)
            steps.run(system, {})
            said = b"."
        except (StockadeError, OSError) as error:
            said = str(error).encode(errors="backslashreplace")
        os.write(report, said[:_REPORT_BYTES])
        # The parent opens our namespace and closes its end.
        os.read(held, 1)
    finally:
        os._exit(0)
