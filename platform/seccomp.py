"""seccomp filters: from a table of rules to the classic BPF program that the kernel runs.

A program looks first at the architecture that the call was made with, then at the number: the same
number is another call under i386's ``int 0x80``, and x32 adds a bit to it. Numbers are found by
binary search. Calls that are always allowed are decided on architecture and number alone, which
lets the kernel remember the answer and not run the program at all for them (Linux 5.11).

Source: seccomp(2), Documentation/userspace-api/seccomp_filter.rst, <linux/bpf_common.h>.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from stockade.platform import syscalls
from stockade.platform._libc import system_call

SYS_SECCOMP: Final = {"x86_64": 317}.get(os.uname().machine, 277)
SECCOMP_SET_MODE_FILTER: Final = 1
SECCOMP_RET_KILL_PROCESS: Final = 0x80000000  # Linux 4.14
SECCOMP_RET_ERRNO: Final = 0x00050000
SECCOMP_RET_ALLOW: Final = 0x7FFF0000
SECCOMP_RET_DATA: Final = 0x0000FFFF
ERRNO_MAX: Final = 4095  # a larger one is cut to this by the kernel

AUDIT_ARCH_X86_64: Final = 0xC000003E
AUDIT_ARCH_AARCH64: Final = 0xC00000B7
AUDIT_ARCH_I386: Final = 0x40000003
AUDIT_ARCH_ARM: Final = 0x40000028
X32_SYSCALL_BIT: Final = 0x40000000
INSTRUCTIONS_MAX: Final = 4096  # BPF_MAXINSNS

LOAD_WORD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP: Final = 0x05  # BPF_JMP | BPF_JA
JUMP_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GREATER_OR_EQUAL: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_SET: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K

# Offsets in struct seccomp_data.
OFFSET_NUMBER: Final = 0
OFFSET_ARCHITECTURE: Final = 4
OFFSET_ARGUMENTS: Final = 16

MASK_32: Final = 0xFFFFFFFF
MASK_64: Final = 0xFFFFFFFFFFFFFFFF

_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter
_ARCHITECTURES: Final = {"x86_64": AUDIT_ARCH_X86_64, "aarch64": AUDIT_ARCH_AARCH64}
_32_BIT: Final = {"x86_64": AUDIT_ARCH_I386, "aarch64": AUDIT_ARCH_ARM}
_NO_CALL: Final = 0xFFFFFFFF
_FAR: Final = 255  # how far a conditional jump reaches

_seccomp: Final = system_call("seccomp", SYS_SECCOMP, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p)


class ProgramHeader(ctypes.Structure):
    """``struct sock_fprog`` of <linux/filter.h>."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


_Code = list[tuple[int, int, int, int]]  # (code, jt, jf, k); ends in a RETURN on every way


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """What becomes of a call: ALLOW, KILL_PROCESS, or ``fail_with(errno)``."""

    value: int


ALLOW: Final = Action(SECCOMP_RET_ALLOW)
KILL_PROCESS: Final = Action(SECCOMP_RET_KILL_PROCESS)


def fail_with(number: int) -> Action:
    """The call is not made and returns this error.

    Raises:
        ValueError: it is not 1 to 4095; with 0 the call would seem to succeed.
    """
    if not 1 <= number <= ERRNO_MAX:
        raise ValueError(f"cannot fail a call with error {number}: it is not 1 to {ERRNO_MAX}")
    return Action(SECCOMP_RET_ERRNO | number)


class Is(enum.Enum):
    """How an argument is compared."""

    EQUAL = "=="
    NOT_EQUAL = "!="


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """A test of one argument: ``argument[index] & mask`` is, or is not, ``value``.

    The kernel itself looks at 32 bits only of an argument that is an int there: such a one needs
    MASK_32, or the test is passed by with garbage in the upper half.

    Raises:
        ValueError: no such argument, or ``value`` has bits outside ``mask`` and so never matches.
    """

    index: int
    relation: Is
    value: int
    mask: int = MASK_64

    def __post_init__(self) -> None:
        if not 0 <= self.index <= 5:
            raise ValueError(f"cannot test argument {self.index}: a call has arguments 0 to 5")
        if not 0 < self.mask <= MASK_64 or self.value & ~self.mask:
            raise ValueError(f"cannot compare with {self.value:#x} under the mask {self.mask:#x}")


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """``action`` for a call by name, if all of ``arguments`` hold."""

    call: str
    action: Action
    arguments: tuple[Argument, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What a filter decides.

    Attributes:
        rules: of those for one call the first that holds decides.
        default: for calls without a rule, and where none of a call's rules holds.
        unknown: for numbers that our tables have no name for, so newer than they are.
        foreign: for calls of other architectures and, on x86-64, of x32, whose numbers mean others.
            Where it is ALLOW, the rules hold for 32-bit and x32 calls all the same.
    """

    rules: tuple[Rule, ...]
    default: Action
    unknown: Action
    foreign: Action = KILL_PROCESS


def compile_filter(policy: Policy, machine: str) -> bytes:
    """The program for ``policy``: struct sock_filter after struct sock_filter.

    A rule for a call that only other machines have is left out.

    Args:
        policy: see Policy.
        machine: as ``os.uname().machine`` has it.

    Raises:
        ValueError: a rule names a call that no machine has, or one that other forms of calls have
            and we know no number of there; there is no table for ``machine``; the program is longer
            than the kernel takes.
    """
    if machine not in _ARCHITECTURES:
        raise ValueError(f"cannot compile a filter for {machine}: there is no table of its calls")
    numbers = syscalls.numbers(machine)
    code = _lead_in(machine, policy) + _search(_segments(policy, numbers))
    if len(code) > INSTRUCTIONS_MAX:
        raise ValueError(
            f"cannot compile a filter of {len(code)} instructions: the limit is {INSTRUCTIONS_MAX}"
        )
    # struct sock_filter is in the byte order of the host; both machines are little-endian.
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in code)


def install(program: bytes) -> None:
    """Puts the calling thread under ``program``, for good, and with it its future children.

    Raises:
        SyscallError: EACCES without no_new_privs or CAP_SYS_ADMIN; EINVAL: not a valid program.
    """
    text = ctypes.create_string_buffer(program, len(program))
    header = ProgramHeader(len(program) // _INSTRUCTION.size, ctypes.addressof(text))
    _seccomp(SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(header))


def _lead_in(machine: str, policy: Policy) -> _Code:
    """Decides about what is not a native 64-bit call, else goes on with its number loaded."""
    in_32_bit = [(LOAD_WORD, 0, 0, OFFSET_NUMBER)]
    in_32_bit += _foreign(policy, syscalls.numbers_32_bit(machine))
    foreign = [(JUMP_EQUAL, 0, len(in_32_bit), _32_BIT[machine]), *in_32_bit]
    foreign.append((RETURN, 0, 0, policy.foreign.value))
    code = [
        (LOAD_WORD, 0, 0, OFFSET_ARCHITECTURE),
        (JUMP_EQUAL, len(foreign), 0, _ARCHITECTURES[machine]),
        *foreign,
        (LOAD_WORD, 0, 0, OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        x32 = _foreign(policy, syscalls.numbers_x32(), X32_SYSCALL_BIT)
        # -1 is no x32 call: programs and tracers use it for "no call at all".
        code += [
            (JUMP_SET, 0, 1 + len(x32), X32_SYSCALL_BIT),
            (JUMP_EQUAL, len(x32), 0, _NO_CALL),
            *x32,
        ]
    return code


def _foreign(policy: Policy, numbers: Mapping[str, tuple[int, ...]], bit: int = 0) -> _Code:
    """Decides about a loaded number of another form of calls; ``bit`` is set in all of them."""
    code: _Code = []
    if policy.foreign == ALLOW:
        for name, rules in _rules_by_call(policy).items():
            if name not in numbers:
                raise ValueError(
                    f"cannot make a rule for {name!r} where foreign calls are allowed: its number "
                    "there is not known"
                )
            body = _decide(rules, policy.foreign)
            for number in numbers[name]:
                code += [(JUMP_EQUAL, 0, len(body), number | bit), *body]
    return [*code, (RETURN, 0, 0, policy.foreign.value)]


def _rules_by_call(policy: Policy) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    for rule in policy.rules:
        of_call = found.setdefault(rule.call, [])
        if of_call and not of_call[-1].arguments:
            raise ValueError(
                f"a rule for {rule.call} is never reached: the one before always holds"
            )
        of_call.append(rule)
    return found


def _segments(policy: Policy, numbers: Mapping[str, int]) -> list[tuple[int, _Code]]:
    """All numbers from 0, cut where the code for them changes: (first number, code)."""
    rules = _rules_by_call(policy)
    known_anywhere = {name for machine in syscalls.MACHINES for name in syscalls.numbers(machine)}
    for name in rules:
        if name not in known_anywhere:
            raise ValueError(f"cannot make a rule for {name!r}: no such system call")
    names = {number: name for name, number in numbers.items()}
    unknown: _Code = [(RETURN, 0, 0, policy.unknown.value)]
    segments: list[tuple[int, _Code]] = []
    for number in range(max(names) + 2):  # one more than there are: all that follow are like it
        code = unknown
        if number in names:
            code = _decide(rules.get(names[number], ()), policy.default)
        if not segments or segments[-1][1] != code:
            segments.append((number, code))
    return segments


def _search(segments: Sequence[tuple[int, _Code]]) -> _Code:
    """A binary search for the last segment that starts at or before the loaded number."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    lower, upper = _search(segments[:middle]), _search(segments[middle:])
    first = segments[middle][0]
    if len(lower) <= _FAR:
        return [(JUMP_GREATER_OR_EQUAL, len(lower), 0, first), *lower, *upper]
    far = [(JUMP_GREATER_OR_EQUAL, 0, 1, first), (JUMP, 0, 0, len(lower))]
    return [*far, *lower, *upper]


def _decide(rules: Sequence[Rule], default: Action) -> _Code:
    """The first rule that holds decides."""
    code: _Code = []
    for rule in rules:
        body: _Code = [(RETURN, 0, 0, rule.action.value)]
        for argument in reversed(rule.arguments):
            body = _test(argument, len(body)) + body
        code += body
    if not rules or rules[-1].arguments:
        code.append((RETURN, 0, 0, default.value))
    return code


def _test(argument: Argument, rest: int) -> _Code:
    """Goes on with the next instruction if the test holds, else skips the ``rest`` that follow."""
    offset = OFFSET_ARGUMENTS + 8 * argument.index
    code: _Code = []
    for half_offset, shift in ((offset, 0), (offset + 4, 32)):  # built from the end
        mask, value = (word >> shift & MASK_32 for word in (argument.mask, argument.value))
        if not mask:
            continue
        if argument.relation is Is.EQUAL:
            jump = (JUMP_EQUAL, 0, len(code) + rest, value)
        elif code:  # the upper half: if it differs the test holds, whatever the lower one is
            jump = (JUMP_EQUAL, 0, len(code), value)
        else:
            jump = (JUMP_EQUAL, rest, 0, value)
        load = [(LOAD_WORD, 0, 0, half_offset)]
        if mask != MASK_32:
            load.append((AND, 0, 0, mask))
        code = [*load, jump, *code]
    return code
