"""The launcher's message and the launcher's program: one description, one build."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_driver import (
    SOURCE,
    USERS,
    WARNINGS,
    ZYGOTE_SOURCE,
    compile_c,
    task_message,
)

from stockade.sandbox import launch_message
from stockade.sandbox.launch_message import (
    HEADER,
    HEADER_FIELDS,
    Flags,
    Step,
    encode,
)

# ---- The message's encoder ----


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ()},
        {"argv": (b"a\0b",)},
        {"environment": (b"A=\0",)},
        {"directory": b"/\0"},
        {"program": b"\0"},
        {"umask": 0o1000},
        {"umask": -1},
        {"filter": bytes(7)},
        {"filter": bytes(8 * 4097)},
        {"rlimits": ((0, 0, 0),) * 17},
        {"rlimits": ((0, -1, 0),)},
        {"rlimits": ((0, 2**64, 0),)},
        {"argv": (b"",) * (2**18 + 1)},
        {"environment": (b"x" * 9_000_000,)},
        {"users": dataclasses.replace(USERS, uid=0)},
        {"users": dataclasses.replace(USERS, init_gid=2**32 - 1)},
        {"users": dataclasses.replace(USERS, uid=USERS.init_uid)},
        {"users": dataclasses.replace(USERS, groups=(0,))},
        {"users": dataclasses.replace(USERS, groups=(1,) * 1025)},
    ],
)
def test_message_that_the_launcher_would_refuse_is_not_encoded(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot start a task"):
        encode(task_message(**changes))


# ---- The program ----


def test_description_of_the_message_is_the_launchers(tmp_path: Path) -> None:
    constants = {
        "MESSAGE_MAGIC": launch_message.MAGIC,
        "MESSAGE_VERSION": launch_message.VERSION,
        "MESSAGE_MAX": launch_message.MESSAGE_MAX,
        "RLIMITS_MAX": launch_message.RLIMITS_MAX,
        "FILTER_MAX": launch_message.FILTER_MAX,
        "GROUPS_MAX": launch_message.GROUPS_MAX,
        "STRINGS_MAX": launch_message.STRINGS_MAX,
        "FD_CHANNEL": launch_message.FD_CHANNEL,
        "FD_MESSAGE": launch_message.FD_MESSAGE,
        "FD_CGROUP": launch_message.FD_CGROUP,
        "FD_RULESET": launch_message.FD_RULESET,
        "FD_FIRST_FREE": launch_message.FD_UID_LOCK + 1,
        "FLAGS_KNOWN": sum(Flags),
        "RLIM_INFINITY": launch_message.RLIM_INFINITY,
        "sizeof(struct header)": HEADER.size,
        "sizeof(struct wire_rlimit)": launch_message.RLIMIT.size,
        "sizeof(struct sock_filter)": launch_message.INSTRUCTION_BYTES,
        "offsetof(struct wire_rlimit, resource)": 0,
        "offsetof(struct wire_rlimit, soft)": 8,
        "offsetof(struct wire_rlimit, hard)": 16,
        **{f"FLAG_{flag.name}": flag.value for flag in Flags},
        **{f"offsetof(struct header, {name})": 4 * at for at, name in enumerate(HEADER_FIELDS)},
    }
    prints = "".join(f'printf("%llu\\n", (unsigned long long)({name}));\n' for name in constants)
    probe = tmp_path / "probe.c"
    probe.write_text(
        f'#define main launcher_main\n#include "{SOURCE}"\n#undef main\n'
        f"int main(void) {{ {prints}"
        "for (int i = 0; i < STEP_COUNT; i++) puts(step_names[i]); return 0; }\n"
    )
    compile_c("-std=c11", "-o", tmp_path / "probe", probe, ZYGOTE_SOURCE)
    lines = subprocess.check_output([tmp_path / "probe"], text=True).split()
    printed = dict(zip(constants, map(int, lines), strict=False))
    assert printed == constants
    assert lines[len(constants) :] == [str(step) for step in Step]


def test_launcher_compiles_without_a_warning(tmp_path: Path) -> None:
    compile_c(*WARNINGS, "-static", "-o", tmp_path / "launcher", SOURCE, ZYGOTE_SOURCE)


def test_launcher_is_short_enough_to_be_read() -> None:
    assert len(SOURCE.read_text().splitlines()) < 500


def test_installed_launcher_is_static() -> None:
    program = SOURCE.with_name("launcher").read_bytes()
    assert program[:6] == b"\x7fELF\x02\x01"
    offset, size, count = (
        struct.unpack_from("<Q", program, 32)[0],
        *struct.unpack_from("<HH", program, 54),
    )
    kinds = [struct.unpack_from("<I", program, offset + size * at)[0] for at in range(count)]
    interpreter, dynamic = 3, 2
    assert interpreter not in kinds
    assert dynamic not in kinds


def test_build_without_a_compiler_says_how_to_mend_it(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root = SOURCE.resolve().parents[1]
    if not (root / "setup.py").exists():
        pytest.skip("needs the source tree")
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", tmp_path, "-t", tmp_path],
        cwd=root,
        env={**os.environ, "CC": "/does/not/exist"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode != 0
    assert "apt install gcc" in built.stderr
