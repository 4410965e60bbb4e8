"""prctl(2) and capabilities(7) of the calling thread, on python-prctl.

The import below finds the installed package: modules here are ``stockade.platform.*``.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import Final

import prctl

from stockade.platform import _libc
from stockade.platform._libc import translated

PR_CAP_AMBIENT: Final = 47
PR_CAP_AMBIENT_RAISE: Final = 2
PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
LINUX_CAPABILITY_VERSION_3: Final = 0x20080522


class Capability(enum.IntEnum):
    """Numbers of <linux/capability.h>; python-prctl knows those of its build host only."""

    CAP_CHOWN = 0
    CAP_DAC_OVERRIDE = 1
    CAP_DAC_READ_SEARCH = 2
    CAP_FOWNER = 3
    CAP_FSETID = 4
    CAP_KILL = 5
    CAP_SETGID = 6
    CAP_SETUID = 7
    CAP_SETPCAP = 8
    CAP_LINUX_IMMUTABLE = 9
    CAP_NET_BIND_SERVICE = 10
    CAP_NET_BROADCAST = 11
    CAP_NET_ADMIN = 12
    CAP_NET_RAW = 13
    CAP_IPC_LOCK = 14
    CAP_IPC_OWNER = 15
    CAP_SYS_MODULE = 16
    CAP_SYS_RAWIO = 17
    CAP_SYS_CHROOT = 18
    CAP_SYS_PTRACE = 19
    CAP_SYS_PACCT = 20
    CAP_SYS_ADMIN = 21
    CAP_SYS_BOOT = 22
    CAP_SYS_NICE = 23
    CAP_SYS_RESOURCE = 24
    CAP_SYS_TIME = 25
    CAP_SYS_TTY_CONFIG = 26
    CAP_MKNOD = 27
    CAP_LEASE = 28
    CAP_AUDIT_WRITE = 29
    CAP_AUDIT_CONTROL = 30
    CAP_SETFCAP = 31
    CAP_MAC_OVERRIDE = 32
    CAP_MAC_ADMIN = 33
    CAP_SYSLOG = 34
    CAP_WAKE_ALARM = 35
    CAP_BLOCK_SUSPEND = 36
    CAP_AUDIT_READ = 37
    CAP_PERFMON = 38
    CAP_BPF = 39
    CAP_CHECKPOINT_RESTORE = 40


def set_child_subreaper() -> None:
    """Orphans among our descendants become our children (PR_SET_CHILD_SUBREAPER, Linux 3.4)."""
    with translated("prctl", "PR_SET_CHILD_SUBREAPER", 1):
        prctl.set_child_subreaper(1)


def allow_dump() -> None:
    """Lets others of our uid look into /proc/PID, which a change of uid forbids, and trace us."""
    with translated("prctl", "PR_SET_DUMPABLE", 1):
        prctl.set_dumpable(1)


def set_no_new_privs() -> None:
    """No execve gives us or our children privileges any more; it cannot be undone."""
    with translated("prctl", "PR_SET_NO_NEW_PRIVS", 1):
        prctl.set_no_new_privs(1)


def set_name(name: str) -> None:
    """Sets the name that ps and top show, cut to 15 bytes."""
    with translated("prctl", "PR_SET_NAME", name):
        prctl.set_name(name.encode()[:15].decode(errors="ignore"))


def empty_bounding_set() -> None:
    """No execve can bring a capability any more, not even as root; those in force stay.

    Raises:
        SyscallError: EPERM without CAP_SETPCAP.
    """
    _limit_bounding_set(0)


def drop_capabilities(keep: frozenset[str]) -> None:
    """Of the permitted capabilities only those in ``keep`` stay, and those become effective.

    The bounding set is cut to ``keep``, so an execve as root cannot bring the others back. The
    inheritable and ambient sets become empty. A capability that we lack is never added.

    Args:
        keep: names such as ``CAP_KILL``.

    Raises:
        ValueError: a name is unknown.
        SyscallError: EPERM without CAP_SETPCAP, when the bounding set holds more than ``keep``;
            nothing was changed then.
    """
    try:
        wanted = sum(1 << Capability[name] for name in keep)
    except KeyError as error:
        raise ValueError(f"cannot keep capability {error}: its name is unknown") from error
    sets = _own_sets()
    # First: it needs CAP_SETPCAP, which the steps below may drop.
    _limit_bounding_set(wanted)
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    left = sets["CapPrm"] & wanted
    _set_own_sets(permitted=left, effective=left, inheritable=0)


def keep_over_exec(kept: frozenset[str]) -> None:
    """Permitted capabilities in ``kept`` outlast an execve, also where the uid is not 0.

    Raises:
        ValueError: a name is unknown.
        SyscallError: EPERM, one of them is not permitted.

    Source: "Ambient" in capabilities(7).
    """
    try:
        numbers = [int(Capability[name]) for name in kept]
    except KeyError as error:
        raise ValueError(f"cannot keep capability {error}: its name is unknown") from error
    sets = _own_sets()
    inheritable = sets["CapInh"] | sum(1 << number for number in numbers)
    _set_own_sets(permitted=sets["CapPrm"], effective=sets["CapEff"], inheritable=inheritable)
    for number in numbers:
        _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0)


def _limit_bounding_set(wanted: int) -> None:
    bounding = _own_sets()["CapBnd"]
    for number in range(bounding.bit_length()):
        if bounding >> number & 1 and not wanted >> number & 1:
            with translated("prctl", "PR_CAPBSET_DROP", number):
                prctl.capbset_drop(number)


def effective_capabilities() -> frozenset[str]:
    """The names in our effective set; one without a name here is ``CAP_NUMBER``."""
    mask = _own_sets()["CapEff"]
    known = {capability.value: capability.name for capability in Capability}
    return frozenset(
        known.get(number, f"CAP_{number}")
        for number in range(mask.bit_length())
        if mask >> number & 1
    )


def _set_own_sets(*, permitted: int, effective: int, inheritable: int) -> None:
    # capset itself and not python-prctl: its lists end at the newest capability of its build host,
    # and one that the running kernel added since would stay.
    data = (_libc.CapabilityData * 2)()
    for half, word in enumerate(data):
        shift = 32 * half
        word.permitted = permitted >> shift & 0xFFFFFFFF
        word.effective = effective >> shift & 0xFFFFFFFF
        word.inheritable = inheritable >> shift & 0xFFFFFFFF
    header = _libc.CapabilityHeader(LINUX_CAPABILITY_VERSION_3, 0)
    _libc.capset(ctypes.byref(header), data)


def _own_sets() -> dict[str, int]:
    with translated("read", "/proc/thread-self/status"):
        lines = Path("/proc/thread-self/status").read_text().splitlines()
    return {
        name: int(value, 16)
        for name, _, value in (line.partition(":") for line in lines)
        if name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    }
