"""What the profiles forbid by system call, and why.

``process`` and ``private`` forbid two things, see ``basic``. The rest is about ``sealed``.

Everything is allowed but what is listed: a task runs any program, and what programs call is not
known beforehand. Listed is what lets a task reach past its namespaces or its uid, change the host,
or use a part of the kernel that ordinary programs never need and that has often been broken. Most
of it takes privileges that a task does not have anyway; the filter is the second lock.

A forbidden call fails with EPERM, which programs take as "not permitted here". Two are answered
with ENOSYS, "this kernel has no such call", because programs then fall back: clone3, whose flags
lie in memory where a filter cannot look (the C library goes on with clone), and calls newer than
our tables.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from stockade.platform.files import FS_IOC32_SETFLAGS, FS_IOC_SETFLAGS
from stockade.platform.quota import FS_IOC_FSSETXATTR
from stockade.platform.seccomp import (
    ALLOW,
    MASK_32,
    Argument,
    Is,
    Policy,
    Rule,
    compile_filter,
    fail_with,
)
from stockade.sandbox.profiles import Profile

_DENY: Final = fail_with(errno.EPERM)
_ABSENT: Final = fail_with(errno.ENOSYS)

# Calls that fail whatever their arguments are, by what they are for.
FORBIDDEN: Final[dict[str, tuple[str, ...]]] = {
    "io_uring": ("io_uring_setup", "io_uring_enter", "io_uring_register"),
    # Keys belong to a uid and outlive its processes.
    "keyrings": ("add_key", "request_key", "keyctl"),
    "kernel programs and tracing": ("bpf", "perf_event_open", "lookup_dcookie", "syslog"),
    # It lets a program stop the kernel in the middle of a copy, which many exploits need.
    "page faults in user space": ("userfaultfd",),
    "mounts": (
        "mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount",
        "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
    ),
    "other processes": (
        "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd",
    ),
    "another kernel": ("kexec_load", "kexec_file_load", "reboot"),
    "kernel modules": (
        "init_module", "finit_module", "delete_module", "create_module", "query_module",
        "get_kernel_syms",
    ),
    # unshare, clone and clone3 are below.
    "namespaces": ("setns",),
    # name_to_handle_at only names a file that one can reach; the other opens it past every mount.
    "files by handle": ("open_by_handle_at",),
    "swap, quota and accounting": ("swapon", "swapoff", "quotactl", "quotactl_fd", "acct"),
    "clocks": ("settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
    "host names": ("sethostname", "setdomainname"),
    "hardware": ("iopl", "ioperm", "vhangup"),
    # Segments of one's own; nothing but 16-bit emulators uses them.
    "descriptor tables": ("modify_ldt",),
    "obsolete calls": (
        "nfsservctl", "uselib", "ustat", "sysfs", "_sysctl", "afs_syscall", "tuxcall", "security",
        "vserver", "getpmsg", "putpmsg", "epoll_ctl_old", "epoll_wait_old",
    ),
}  # fmt: skip

# CLONE_NEWTIME's bit means something else to clone, which cannot make a time namespace.
CLONE_NEWTIME: Final = 0x00000080
CLONE_NEW: Final = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

TIOCSTI: Final = 0x5412  # types into the terminal as if its user had
TIOCLINUX: Final = 0x541C  # pastes into a virtual console
PTRACE_ATTACH: Final = 16
PTRACE_SEIZE: Final = 0x4206
PERSONALITY_QUERY: Final = 0xFFFFFFFF
NETLINK_ROUTE: Final = 0
NETLINK_SOCK_DIAG: Final = 4
SOCK_TYPE_MASK: Final = 0xF
SOCK_RAW: Final = 3
SOCK_PACKET: Final = 10  # with AF_INET the kernel takes it for AF_PACKET

# Either takes files out of their project, and so out of the quota of the work directory.
ATTRIBUTES: Final = (FS_IOC_FSSETXATTR, FS_IOC_SETFLAGS, FS_IOC32_SETFLAGS)

# For these the kernel may load a module: DCCP, L2TP and SCTP.
LOADED_PROTOCOLS: Final = (33, 115, socket.IPPROTO_SCTP)
SOCKET_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


def basic() -> Policy:
    """The policy of the profiles that are not sealed: a task attaches to no running process.

    Its launcher is out of its reach anyway; this keeps tasks apart that share a uid (no root), and
    a program that was taken over from the ones beside it in its task. A debugger that starts its
    program itself works. Nor does a task change attributes of files (chattr), see ATTRIBUTES. All
    of it holds for 32-bit programs too, which work.
    """
    attach = (
        Rule("ptrace", _DENY, (_int(0, Is.EQUAL, request),))
        for request in (PTRACE_ATTACH, PTRACE_SEIZE)
    )
    rules = (*attach, *_attributes())
    return Policy(rules, default=ALLOW, unknown=ALLOW, foreign=ALLOW)


def sealed() -> Policy:
    """The policy of the profile ``sealed``."""
    return _strict(())


def supervisor() -> Policy:
    """The supervisor's own: a sealed task's, and it asks the kernel whose a connection is."""
    netlink = _int(0, Is.EQUAL, socket.AF_NETLINK)
    diagnosis = Rule("socket", ALLOW, (netlink, _int(2, Is.EQUAL, NETLINK_SOCK_DIAG)))
    return _strict((diagnosis,))


def _strict(before: tuple[Rule, ...]) -> Policy:
    rules = [Rule(call, _DENY) for calls in FORBIDDEN.values() for call in calls]
    rules += [
        Rule("clone3", _ABSENT),
        Rule("clone", _DENY, (_int(0, Is.NOT_EQUAL, 0, CLONE_NEW),)),
        Rule("unshare", _DENY, (_int(0, Is.NOT_EQUAL, 0, CLONE_NEW | CLONE_NEWTIME),)),
        Rule("ioctl", _DENY, (_int(1, Is.EQUAL, TIOCSTI),)),
        Rule("ioctl", _DENY, (_int(1, Is.EQUAL, TIOCLINUX),)),
        *_attributes(),
        # Other personalities weaken the layout of memory or pretend to be another kernel.
        Rule("personality", ALLOW, (_int(0, Is.EQUAL, 0),)),
        Rule("personality", ALLOW, (_int(0, Is.EQUAL, PERSONALITY_QUERY),)),
        Rule("personality", _DENY),
        *before,
        *_sockets(),
    ]
    return Policy(tuple(rules), default=ALLOW, unknown=_ABSENT)


def filter_of(profile: Profile, machine: str) -> bytes:
    """The compiled filter of a profile, for the launcher's message.

    Args:
        profile: whose.
        machine: as ``os.uname().machine`` has it.

    Raises:
        ValueError: there is no table of the machine's system calls.
    """
    return compile_filter(sealed() if profile is Profile.SEALED else basic(), machine)


def _attributes() -> list[Rule]:
    rules = [Rule("ioctl", _DENY, (_int(1, Is.EQUAL, command),)) for command in ATTRIBUTES]
    return [*rules, Rule("file_setattr", _DENY)]


def _sockets() -> list[Rule]:
    """Only Unix, IPv4 and IPv6 sockets, none raw or rare; and netlink to look at interfaces.

    In a network of its own loopback nothing else has a use: not packet, vsock (which reaches the
    hypervisor past every network namespace), Bluetooth, CAN or the kernel's crypto sockets.
    """
    netlink = _int(0, Is.EQUAL, socket.AF_NETLINK)
    return [
        # The C library lists interfaces through it, by a raw socket that is not raw at all.
        Rule("socket", ALLOW, (netlink, _int(2, Is.EQUAL, NETLINK_ROUTE))),
        *(
            Rule("socket", _DENY, (_int(1, Is.EQUAL, kind, SOCK_TYPE_MASK),))
            for kind in (SOCK_RAW, SOCK_PACKET)
        ),
        *(Rule("socket", _DENY, (_int(2, Is.EQUAL, each),)) for each in LOADED_PROTOCOLS),
        *(Rule("socket", ALLOW, (_int(0, Is.EQUAL, family),)) for family in SOCKET_FAMILIES),
        Rule("socket", _DENY),
        Rule("socketpair", ALLOW, (_int(0, Is.EQUAL, socket.AF_UNIX),)),
        Rule("socketpair", _DENY),
    ]


def _int(index: int, relation: Is, value: int, mask: int = MASK_32) -> Argument:
    """A test of an argument that is an int to the kernel, which ignores the register's rest."""
    return Argument(index, relation, int(value), mask)
