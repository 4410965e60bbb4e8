"""The filter compiler: against an interpreter of BPF here, and in the kernel itself."""

import dataclasses
import errno
import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from stockade.platform import seccomp, syscalls
from stockade.platform.seccomp import (
    ALLOW,
    KILL_PROCESS,
    Action,
    Argument,
    Is,
    Policy,
    Rule,
    compile_filter,
    fail_with,
)

MACHINE = os.uname().machine
ARCHITECTURES = {
    "x86_64": seccomp.AUDIT_ARCH_X86_64,
    "aarch64": seccomp.AUDIT_ARCH_AARCH64,
}

needs_table = pytest.mark.skipif(
    MACHINE not in syscalls.MACHINES, reason=f"no table of system calls for {MACHINE}"
)


def run_bpf(program: bytes, architecture: int, number: int, arguments=()) -> tuple[int, int]:
    """What the kernel would do: the returned value and how many instructions it took."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *arguments)
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, at = 0, 0
    for steps in range(1, len(code) + 1):
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == seccomp.LOAD_WORD:
            assert k % 4 == 0
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == seccomp.AND:
            accumulator &= k
        elif operation == seccomp.RETURN:
            return k, steps
        elif operation == seccomp.JUMP:
            at += k
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == k,
                seccomp.JUMP_GREATER_OR_EQUAL: accumulator >= k,
                seccomp.JUMP_SET: bool(accumulator & k),
            }[operation]
            at += if_true if holds else if_false
    raise AssertionError("ran past every instruction")


def decide(policy: Policy, machine: str, number: int, arguments) -> Action:
    """What the policy says, read plainly."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    names = {value: name for name, value in syscalls.numbers(machine).items()}
    if number not in names:
        return policy.unknown
    for rule in policy.rules:
        if rule.call == names[number] and all(
            (arguments[test.index] & test.mask == test.value) == (test.relation is Is.EQUAL)
            for test in rule.arguments
        ):
            return rule.action
    return policy.default


def random_policy(chance: random.Random, machine: str) -> Policy:
    """Rules for many calls: more than one jump reaches over."""
    names = list(syscalls.numbers(machine))
    actions = [ALLOW, KILL_PROCESS, *(fail_with(number) for number in range(1, 40))]
    rules = []
    for name in chance.sample(names, chance.randrange(0, len(names))):
        for _ in range(chance.randrange(0, 3)):
            tests = []
            for _ in range(chance.randrange(1, 4)):
                mask = chance.choice(
                    [seccomp.MASK_64, seccomp.MASK_32, 0xF, 0x7E020000, 0xF << 40, 0x10000000F]
                )
                value = chance.choice([0, 1, 3, 0x5412, 0x100000003, 1 << 40]) & mask
                tests.append(Argument(chance.randrange(6), chance.choice(list(Is)), value, mask))
            rules.append(Rule(name, chance.choice(actions), tuple(tests)))
        if chance.random() < 0.5:
            rules.append(Rule(name, chance.choice(actions)))
    return Policy(tuple(rules), chance.choice(actions), chance.choice(actions))


@pytest.mark.parametrize("machine", sorted(syscalls.MACHINES))
@pytest.mark.parametrize("seed", range(4))
def test_program_decides_as_the_policy_reads(machine, seed):
    chance = random.Random(seed)
    policy = random_policy(chance, machine)
    program = compile_filter(policy, machine)
    interesting = [0, 1, 3, 0x5412, 0xF, 0x100000003, 1 << 40, seccomp.MASK_64, 0x7E020000]
    for number in [*range(600), 0x3FFFFFFF, 0xFFFFFFFF]:
        for _ in range(3):
            arguments = [chance.choice(interesting) for _ in range(6)]
            expected = decide(policy, machine, number, arguments).value
            answered, _ = run_bpf(program, ARCHITECTURES[machine], number, arguments)
            assert answered == expected, (number, arguments)


@pytest.mark.parametrize("machine", sorted(syscalls.MACHINES))
def test_foreign_architectures_are_killed_whatever_the_number(machine):
    program = compile_filter(Policy((), ALLOW, ALLOW), machine)
    foreign = {*ARCHITECTURES.values(), seccomp.AUDIT_ARCH_I386, seccomp.AUDIT_ARCH_ARM}
    foreign.remove(ARCHITECTURES[machine])
    for architecture in foreign:
        for number in (0, 20, 59, 450):
            assert run_bpf(program, architecture, number)[0] == seccomp.SECCOMP_RET_KILL_PROCESS


def test_x32_calls_are_killed_and_no_call_at_all_is_not():
    program = compile_filter(Policy((), ALLOW, fail_with(errno.ENOSYS)), "x86_64")
    native = seccomp.AUDIT_ARCH_X86_64
    for number in (0, 20, 59, 512, 547):
        killed, _ = run_bpf(program, native, number | seccomp.X32_SYSCALL_BIT)
        assert killed == seccomp.SECCOMP_RET_KILL_PROCESS
    assert run_bpf(program, native, -1)[0] == fail_with(errno.ENOSYS).value
    assert run_bpf(program, native, 0)[0] == seccomp.SECCOMP_RET_ALLOW


# ioctl and file_setattr in each form of calls that is not the native one.
FOREIGN = [
    ("x86_64", seccomp.AUDIT_ARCH_I386, 54, 469),
    ("x86_64", seccomp.AUDIT_ARCH_X86_64, 514 | seccomp.X32_SYSCALL_BIT,
     469 | seccomp.X32_SYSCALL_BIT),
    # Old kernels take the native number too.
    ("x86_64", seccomp.AUDIT_ARCH_X86_64, 16 | seccomp.X32_SYSCALL_BIT,
     469 | seccomp.X32_SYSCALL_BIT),
    ("aarch64", seccomp.AUDIT_ARCH_ARM, 54, 469),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "architecture", "ioctl", "file_setattr"), FOREIGN)
def test_rules_hold_for_foreign_calls_where_these_are_allowed(
    machine, architecture, ioctl, file_setattr
):
    deny = fail_with(errno.EPERM)
    rules = (
        Rule("ioctl", deny, (Argument(1, Is.EQUAL, 7, seccomp.MASK_32),)),
        Rule("ioctl", deny, (Argument(1, Is.EQUAL, 8, seccomp.MASK_32),)),
        Rule("file_setattr", deny),
    )
    program = compile_filter(Policy(rules, ALLOW, ALLOW, foreign=ALLOW), machine)

    def answer(number, *arguments):
        return run_bpf(program, architecture, number, arguments)[0]

    assert [answer(ioctl, 0, value) for value in (6, 7, 8)] == [
        ALLOW.value, deny.value, deny.value,
    ]  # fmt: skip
    assert answer(file_setattr) == deny.value
    assert answer(file_setattr - 1) == ALLOW.value


def test_rule_that_foreign_calls_would_pass_by_is_refused():
    policy = Policy((Rule("mount", fail_with(errno.EPERM)),), ALLOW, ALLOW, foreign=ALLOW)
    with pytest.raises(ValueError, match="'mount' where foreign calls are allowed"):
        compile_filter(policy, "x86_64")


@pytest.mark.parametrize("machine", sorted(syscalls.MACHINES))
def test_number_is_found_by_few_steps(machine):
    deny = fail_with(errno.EPERM)
    every_other = list(syscalls.numbers(machine))[::2]
    program = compile_filter(Policy(tuple(Rule(name, deny) for name in every_other), ALLOW, deny),
                             machine)  # fmt: skip
    steps = [run_bpf(program, ARCHITECTURES[machine], number)[1] for number in range(500)]
    assert max(steps) <= 30
    assert len(program) // 8 <= seccomp.INSTRUCTIONS_MAX


def test_rule_for_a_call_of_other_machines_is_left_out():
    policy = Policy((Rule("iopl", KILL_PROCESS),), ALLOW, ALLOW)
    assert len(compile_filter(policy, "aarch64")) < len(compile_filter(policy, "x86_64"))


@pytest.mark.parametrize(
    ("rules", "machine", "complaint"),
    [
        ((Rule("iouring_setup", KILL_PROCESS),), "x86_64", "no such system call"),
        ((Rule("read", ALLOW), Rule("read", KILL_PROCESS)), "x86_64", "never reached"),
        ((), "vax", "no table"),
    ],
)
def test_mistakes_in_a_policy_are_refused(rules, machine, complaint):
    with pytest.raises(ValueError, match=complaint):
        compile_filter(Policy(rules, ALLOW, ALLOW), machine)


@pytest.mark.parametrize(
    "arguments", [(6, Is.EQUAL, 0), (0, Is.EQUAL, 0x10, 0xF), (0, Is.EQUAL, 0, 0)]
)
def test_tests_that_could_not_mean_what_they_say_are_refused(arguments):
    with pytest.raises(ValueError, match="cannot"):
        Argument(*arguments)


def test_program_longer_than_the_kernel_takes_is_refused():
    tests = tuple(Argument(index, Is.NOT_EQUAL, 0, 0x100000001) for index in range(6))
    rules = [
        dataclasses.replace(Rule("read", fail_with(errno_), tests)) for errno_ in range(1, 200)
    ]
    with pytest.raises(ValueError, match="the limit is 4096"):
        compile_filter(Policy(tuple(rules), ALLOW, ALLOW), "x86_64")


@pytest.mark.parametrize("number", [0, -1, 4096])
def test_errors_that_would_not_be_errors_are_refused(number):
    with pytest.raises(ValueError, match="cannot fail a call"):
        fail_with(number)


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )


@needs_table
def test_kernel_takes_the_program_and_does_as_it_says():
    done = run_python("""
import errno, os
from stockade.platform import prctl, seccomp
from stockade.platform.seccomp import *
rules = (
    Rule("getpriority", fail_with(errno.EXDEV), (Argument(1, Is.EQUAL, 7, MASK_32),)),
    Rule("sethostname", fail_with(errno.EDOM)),
)
prctl.set_no_new_privs()
install(compile_filter(Policy(rules, ALLOW, fail_with(errno.ENOSYS)), os.uname().machine))
os.getpriority(0, 0)
try:
    os.getpriority(0, 7)
except OSError as error:
    assert error.errno == errno.EXDEV
else:
    raise AssertionError
print("done")
""")
    assert done.stdout == "done\n", done.stderr


@needs_table
def test_killing_action_kills_the_whole_process():
    done = run_python("""
import os, threading
from stockade.platform import prctl
from stockade.platform.seccomp import *
prctl.set_no_new_privs()
install(compile_filter(Policy((Rule("uname", KILL_PROCESS),), ALLOW, ALLOW), os.uname().machine))
thread = threading.Thread(target=os.uname)
thread.start()
thread.join()
print("survived")
""")
    assert (done.returncode, done.stdout) == (-signal.SIGSYS, "")


@needs_table
def test_program_that_is_none_is_refused_by_the_kernel():
    done = run_python("""
import errno
from stockade.platform import prctl
from stockade.platform.errors import SyscallError
from stockade.platform.seccomp import install
prctl.set_no_new_privs()
try:
    install(bytes(8))
except SyscallError as error:
    assert error.errno == errno.EINVAL and error.call == "seccomp"
    print("refused")
""")
    assert done.stdout == "refused\n", done.stderr
