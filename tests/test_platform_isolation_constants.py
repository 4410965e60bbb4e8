"""Constants and struct sizes of mounts, seccomp, Landlock, keyrings and IPC against C headers."""

import ctypes
import shutil
import subprocess

import pytest

from stockade.platform import ipc, keyring, landlock, mounts, net, seccomp
from stockade.sandbox import seccomp_policy

HEADERS = (
    "sched.h",
    "fcntl.h",
    "errno.h",
    "sys/mount.h",
    "sys/syscall.h",
    "sys/socket.h",
    "sys/ioctl.h",
    "sys/ipc.h",
    "asm/termbits.h",
    "asm/ioctls.h",
    "net/if.h",
    "linux/audit.h",
    "linux/filter.h",
    "linux/keyctl.h",
    "linux/landlock.h",
    "linux/netlink.h",
    "linux/seccomp.h",
)

BPF = {
    "LOAD_WORD": "BPF_LD | BPF_W | BPF_ABS",
    "AND": "BPF_ALU | BPF_AND | BPF_K",
    "JUMP": "BPF_JMP | BPF_JA",
    "JUMP_EQUAL": "BPF_JMP | BPF_JEQ | BPF_K",
    "JUMP_GREATER_OR_EQUAL": "BPF_JMP | BPF_JGE | BPF_K",
    "JUMP_SET": "BPF_JMP | BPF_JSET | BPF_K",
    "RETURN": "BPF_RET | BPF_K",
}
NEW_NAMESPACES = (
    "CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID"
    " | CLONE_NEWNET"
)


def named(module: object, *prefixes: str) -> dict[str, int]:
    return {name: getattr(module, name) for name in vars(module) if name.startswith(prefixes)}


def ours() -> dict[str, int]:
    """Each C expression whose value we wrote down, and what we wrote."""
    table = named(mounts, "MS_", "MNT_", "MOUNT_", "OPEN_TREE_", "MOVE_", "FS", "AT_", "UMOUNT_")
    table |= named(seccomp, "SECCOMP_", "AUDIT_ARCH_")
    table |= named(keyring, "KEYCTL_", "KEY_")
    table |= named(landlock, "LANDLOCK_")
    table |= named(net, "SIOC", "IFF_")
    for module in (mounts, seccomp, keyring, landlock):
        table |= {
            f"SYS_{name.removeprefix('SYS_').lower()}": number
            for name, number in named(module, "SYS_").items()
        }
    table |= {expression: getattr(seccomp, name) for name, expression in BPF.items()}
    table |= {f"LANDLOCK_ACCESS_FS_{right.name}": right.value for right in landlock.AccessFs}
    table |= {f"LANDLOCK_ACCESS_NET_{right.name}": right.value for right in landlock.AccessNet}
    table |= {f"LANDLOCK_SCOPE_{scope.name}": scope.value for scope in landlock.Scope}
    table |= {
        "IPC_RMID": ipc.IPC_RMID,
        "BPF_MAXINSNS": seccomp.INSTRUCTIONS_MAX,
        "__X32_SYSCALL_BIT": seccomp.X32_SYSCALL_BIT,
        "offsetof(struct seccomp_data, nr)": seccomp.OFFSET_NUMBER,
        "offsetof(struct seccomp_data, arch)": seccomp.OFFSET_ARCHITECTURE,
        "offsetof(struct seccomp_data, args)": seccomp.OFFSET_ARGUMENTS,
        "sizeof(struct sock_filter)": 8,
        "sizeof(struct sock_fprog)": ctypes.sizeof(seccomp.ProgramHeader),
        "offsetof(struct sock_fprog, filter)": seccomp.ProgramHeader.instructions.offset,
        "sizeof(struct mount_attr)": ctypes.sizeof(mounts.MountAttributes),
        "sizeof(struct landlock_path_beneath_attr)": ctypes.sizeof(landlock.PathAttributes),
        "sizeof(struct ifreq)": net.REQUEST_BYTES,
        "TIOCSTI": seccomp_policy.TIOCSTI,
        "TIOCLINUX": seccomp_policy.TIOCLINUX,
        "NETLINK_ROUTE": seccomp_policy.NETLINK_ROUTE,
        "SOCK_RAW": seccomp_policy.SOCK_RAW,
        "SOCK_PACKET": seccomp_policy.SOCK_PACKET,
        "CLONE_NEWTIME": seccomp_policy.CLONE_NEWTIME,
        NEW_NAMESPACES: seccomp_policy.CLONE_NEW,
    }
    return table


def values(expressions: list[str], directory) -> dict[str, int | None]:
    """What C has for each; None for a macro or constant that the headers are too old for."""
    includes = "\n".join(f"#include <{header}>" for header in HEADERS)
    prologue = f"#define _GNU_SOURCE\n#include <stdio.h>\n#include <stddef.h>\n{includes}\n"
    source = directory / "print.c"
    unknown: set[str] = set()
    while True:
        known = [expression for expression in expressions if expression not in unknown]
        lines = [
            f'\n#line {number} "entry"\nprintf("%llu\\n", (unsigned long long)({expression}));'
            for number, expression in enumerate(known, 1)
        ]
        source.write_text(f"{prologue}int main(void) {{{''.join(lines)}\nreturn 0; }}\n")
        program = directory / "print"
        done = subprocess.run(
            ["gcc", "-o", program, source], check=False, capture_output=True, text=True, timeout=60
        )
        if done.returncode == 0:
            break
        failed = {
            known[int(line.split(":")[1]) - 1]
            for line in done.stderr.splitlines()
            if line.startswith("entry:") and " error: " in line and "undeclared" in line
        }
        assert failed, done.stderr
        unknown |= failed
    printed = subprocess.run([program], check=True, capture_output=True, text=True, timeout=10)
    found: dict[str, int | None] = dict.fromkeys(unknown)
    found.update(zip(known, map(int, printed.stdout.split()), strict=True))
    return found


def is_newer_than_the_oldest_supported_headers(expression: str) -> bool:
    """Those of Linux 6.1 and glibc 2.36 lack some, and x32 is on x86 only."""
    return expression.startswith(("LANDLOCK_", "AT_RECURSIVE", "MOUNT_ATTR_NOSYMFOLLOW", "__X32"))


def test_constants_and_sizes_are_those_of_the_c_headers(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler on this host")
    table = ours()
    theirs = values(list(table), tmp_path)
    differing = {
        name: (value, theirs[name])
        for name, value in table.items()
        if theirs[name] is not None and theirs[name] != value & 0xFFFFFFFFFFFFFFFF
    }
    assert differing == {}
    missing = [name for name, value in theirs.items() if value is None]
    assert [name for name in missing if not is_newer_than_the_oldest_supported_headers(name)] == []
