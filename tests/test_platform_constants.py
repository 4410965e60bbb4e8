"""Constants and struct sizes against the C headers of this host."""

import ctypes
import shutil
import subprocess

import pytest

from stockade.platform import _libc, clone, files, prctl, quota, sockdiag, sockets

HEADERS = (
    "linux/sched.h",
    "sched.h",
    "linux/openat2.h",
    "linux/fs.h",
    "linux/capability.h",
    "linux/kcmp.h",
    "linux/quota.h",
    "linux/sock_diag.h",
    "linux/inet_diag.h",
    "linux/netlink.h",
    "netinet/tcp.h",
    "sys/prctl.h",
    "sys/socket.h",
    "sys/syscall.h",
    "sys/un.h",
)


def ours() -> dict[str, int]:
    """Each C expression whose value we wrote down, and what we wrote."""
    table: dict[str, int] = {
        name: getattr(clone, name) for name in vars(clone) if name.startswith("CLONE_")
    }
    table |= {
        name: getattr(files, name)
        for name in vars(files)
        if name.startswith(("RESOLVE_", "FS_IOC", "FS_IMMUTABLE", "FS_APPEND"))
    }
    table |= {
        name: getattr(quota, name)
        for name in vars(quota)
        if name.startswith(("FS_", "Q_", "QIF_", "PRJQUOTA"))
    }
    table |= {capability.name: capability.value for capability in prctl.Capability}
    table |= {
        "CAP_LAST_CAP": max(prctl.Capability),
        "PR_CAP_AMBIENT": prctl.PR_CAP_AMBIENT,
        "PR_CAP_AMBIENT_CLEAR_ALL": prctl.PR_CAP_AMBIENT_CLEAR_ALL,
        "_LINUX_CAPABILITY_VERSION_3": prctl.LINUX_CAPABILITY_VERSION_3,
        "SYS_clone3": _libc.SYS_CLONE3,
        "SYS_openat2": _libc.SYS_OPENAT2,
        "SYS_kcmp": _libc.SYS_KCMP,
        "KCMP_VM": _libc.KCMP_VM,
        "SYS_quotactl_fd": quota.SYS_QUOTACTL_FD,
        "sizeof(struct if_dqblk)": ctypes.sizeof(quota.DiskQuota),
        "offsetof(struct if_dqblk, dqb_curinodes)": quota.DiskQuota.dqb_curinodes.offset,
        "sizeof(struct fsxattr)": quota.FSXATTR.size,
        "NETLINK_SOCK_DIAG": sockdiag.NETLINK_SOCK_DIAG,
        "SOCK_DIAG_BY_FAMILY": sockdiag.SOCK_DIAG_BY_FAMILY,
        "NLM_F_REQUEST": sockdiag.NLM_F_REQUEST,
        "NLMSG_ERROR": sockdiag.NLMSG_ERROR,
        "TCP_LISTEN": sockdiag.TCP_LISTEN,
        "sizeof(((struct sockaddr_un *)0)->sun_path) - 1": sockets.MAX_PATH_BYTES,
        "sizeof(struct clone_args)": ctypes.sizeof(_libc.CloneArgs),
        "sizeof(struct open_how)": ctypes.sizeof(_libc.OpenHow),
        "sizeof(struct __user_cap_header_struct)": ctypes.sizeof(_libc.CapabilityHeader),
        "sizeof(struct __user_cap_data_struct)": ctypes.sizeof(_libc.CapabilityData),
        "sizeof(struct inet_diag_req_v2)": sockdiag.REQUEST_BYTES,
        "sizeof(struct inet_diag_msg)": sockdiag.ANSWER_BYTES,
        "offsetof(struct inet_diag_msg, idiag_uid)": sockdiag.ANSWER_BYTES - 8,
        "offsetof(struct clone_args, cgroup)": _libc.CloneArgs.cgroup.offset,
        "offsetof(struct clone_args, exit_signal)": _libc.CloneArgs.exit_signal.offset,
    }
    return table


def test_constants_and_sizes_are_those_of_the_c_headers(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler on this host")
    table = ours()
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({name}));' for name in table)
    includes = "\n".join(f"#include <{header}>" for header in HEADERS)
    source = tmp_path / "print.c"
    source.write_text(
        f"#define _GNU_SOURCE\n#include <stdio.h>\n#include <stddef.h>\n{includes}\n"
        f"int main(void) {{\n{lines}\nreturn 0; }}\n"
    )
    program = tmp_path / "print"
    subprocess.run(["gcc", "-o", program, source], check=True, timeout=60)
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=10)
    theirs = dict(zip(table, map(int, printed.stdout.split()), strict=True))
    assert {name: value for name, value in table.items() if theirs[name] != value} == {}
