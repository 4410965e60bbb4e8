"""The tables of system call numbers against the headers of this host's kernel."""

import os
import re
import shutil
import subprocess

import pytest

from stockade.platform import syscalls

# What arch/arm64/include/uapi/asm/unistd.h asks of the generic table.
ARM64_WANTS = (
    "RENAMEAT",
    "NEW_STAT",
    "SET_GET_RLIMIT",
    "TIME32_SYSCALLS",
    "SYS_CLONE3",
    "MEMFD_SECRET",
)
HEADERS = {
    "x86_64": "#include <asm/unistd_64.h>\n",
    "aarch64": "".join(f"#define __ARCH_WANT_{want}\n" for want in ARM64_WANTS)
    + "#include <asm-generic/unistd.h>\n",
}


def numbers_of_header(text: str) -> dict[str, int]:
    """Every __NR_ macro's value, through the aliases (__NR3264_) of the generic header."""
    done = subprocess.run(
        ["gcc", "-E", "-dM", "-"],
        input=text,
        text=True,
        capture_output=True,
        check=True,
        timeout=60,
    )
    form = r"^#define (__NR\w+) (?:\(__X32_SYSCALL_BIT \+ )?(\w+)\)?$"
    values = dict(re.findall(form, done.stdout, re.MULTILINE))
    found = {}
    for macro, value in values.items():
        name = macro.removeprefix("__NR_")
        if name != macro and name not in ("syscalls", "arch_specific_syscall"):
            found[name] = int(values.get(value, value))
    return found


@pytest.mark.parametrize("machine", sorted(HEADERS))
def test_numbers_are_those_of_the_kernel_headers(machine):
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler on this host")
    if machine == "x86_64" and os.uname().machine != "x86_64":
        pytest.skip("the headers of x86 are not installed on this host")
    theirs = numbers_of_header(HEADERS[machine])
    ours = syscalls.numbers(machine)
    newest = max(theirs.values())
    # Headers newer than the table may add calls; what both have must agree.
    assert {name: ours.get(name) for name in theirs if theirs[name] <= max(ours.values())} == {
        name: number for name, number in theirs.items() if number <= max(ours.values())
    }
    not_in_header = {name for name in ours if name not in theirs}
    newer = {name for name in not_in_header if ours[name] > newest}
    assert not_in_header - newer <= {"uretprobe", "uprobe"}  # x86's own, Linux 6.11 and 6.18


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("asm/unistd_32.h", syscalls.numbers_32_bit("x86_64")),
        ("asm/unistd_x32.h", syscalls.numbers_x32()),
    ],
)
def test_numbers_of_other_forms_are_those_of_the_kernel_headers(header, ours):
    if shutil.which("gcc") is None or os.uname().machine != "x86_64":
        pytest.skip("needs a C compiler and the headers of x86")
    theirs = numbers_of_header(f"#include <{header}>\n")
    common = theirs.keys() & ours.keys()
    assert {"ioctl", "ptrace", "quotactl_fd"} <= common
    assert {name: ours[name][0] for name in common} == {name: theirs[name] for name in common}


@pytest.mark.parametrize("machine", sorted(syscalls.MACHINES))
def test_no_number_is_given_twice(machine):
    ours = syscalls.numbers(machine)
    assert len(set(ours.values())) == len(ours)


def test_every_machine_has_its_header_here():
    assert frozenset(HEADERS) == syscalls.MACHINES


def test_numbers_are_those_this_kernel_answers_to():
    if os.uname().machine not in syscalls.MACHINES:
        pytest.skip(f"no table for {os.uname().machine}")
    from stockade.platform._libc import libc

    ours = syscalls.numbers(os.uname().machine)
    assert libc.syscall(ours["getpid"]) == os.getpid()
    assert libc.syscall(ours["getuid"]) == os.getuid()


def test_unknown_machine_is_refused():
    with pytest.raises(KeyError):
        syscalls.numbers("vax")
