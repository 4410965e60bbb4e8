"""prctl and capabilities, each in a process of its own, compared with /proc/self/status."""

import os

import pytest
import python_process

from stockade.platform import prctl

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PREAMBLE = """
import os, sys
from stockade.platform import prctl
from stockade.platform.errors import SyscallError

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()

def sets():
    return {name: int(status("Cap" + name), 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}

def mask(*names):
    return sum(1 << prctl.Capability[name] for name in names)
"""


def run_python(script: str) -> str:
    return python_process.run_python(PREAMBLE + script)


@needs_root
def test_only_the_kept_capabilities_stay_in_every_set():
    run_python("""
keep = frozenset({"CAP_KILL", "CAP_CHECKPOINT_RESTORE"})
prctl.drop_capabilities(keep)
kept = mask(*keep)
assert sets() == {"Inh": 0, "Prm": kept, "Eff": kept, "Bnd": kept, "Amb": 0}, sets()
assert prctl.effective_capabilities() == keep
""")


@needs_root
def test_inheritable_and_ambient_capabilities_go():
    run_python("""
import ctypes
from stockade.platform import _libc
data = (_libc.CapabilityData * 2)()
data[0].permitted = data[0].effective = data[0].inheritable = sets()["Prm"] & 0xFFFFFFFF
_libc.capset(ctypes.byref(_libc.CapabilityHeader(prctl.LINUX_CAPABILITY_VERSION_3, 0)), data)
_libc.prctl(prctl.PR_CAP_AMBIENT, 2, prctl.Capability.CAP_KILL, 0, 0)  # PR_CAP_AMBIENT_RAISE
assert sets()["Amb"] == mask("CAP_KILL") and sets()["Inh"]
prctl.drop_capabilities(frozenset({"CAP_KILL", "CAP_CHOWN"}))
assert sets()["Amb"] == sets()["Inh"] == 0
assert sets()["Eff"] == mask("CAP_KILL", "CAP_CHOWN")
""")


@needs_root
def test_an_exec_as_root_does_not_bring_them_back():
    printed = run_python("""
prctl.drop_capabilities(frozenset({"CAP_KILL"}))
os.execv("/bin/grep", ["grep", "CapEff", "/proc/self/status"])
""")
    assert int(printed.split()[1], 16) == 1 << prctl.Capability.CAP_KILL


@needs_root
def test_without_setpcap_nothing_is_dropped_and_eperm_says_so():
    run_python("""
prctl.drop_capabilities(frozenset({"CAP_KILL", "CAP_CHOWN"}))
before = sets()
try:
    prctl.drop_capabilities(frozenset())
except SyscallError as error:
    assert "EPERM" in str(error) and "PR_CAPBSET_DROP" in str(error)
else:
    raise SystemExit("no error")
assert sets() == before
""")


def test_unknown_capability_is_refused():
    with pytest.raises(ValueError, match="CAP_TYPO"):
        prctl.drop_capabilities(frozenset({"CAP_TYPO"}))


def test_names_of_effective_capabilities_are_those_of_proc():
    run_python("""
names = prctl.effective_capabilities()
assert mask(*names) == sets()["Eff"]
""")


def test_no_new_privs_is_set():
    run_python("""
assert status("NoNewPrivs") == "0"
prctl.set_no_new_privs()
assert status("NoNewPrivs") == "1"
""")


def test_name_is_cut_to_fifteen_bytes():
    run_python("""
prctl.set_name("stockade-spawner-1")
assert status("Name") == "stockade-spawne", status("Name")
""")


@needs_root
def test_what_may_not_be_dumped_belongs_to_root():
    run_python(
        """
os.setresuid(1900000002, 1900000002, 1900000002)  # which itself forbids it
assert os.stat("/proc/self/environ").st_uid == 0
prctl.allow_dump()
assert os.stat("/proc/self/environ").st_uid == os.getuid()
"""
    )


def test_a_subreaper_gets_the_orphans():
    run_python("""
import subprocess
prctl.set_child_subreaper()
orphan = int(subprocess.check_output(["sh", "-c", "sleep 60 >/dev/null & echo $!"]))
assert f"PPid:\\t{os.getpid()}\\n" in open(f"/proc/{orphan}/status").read()
os.kill(orphan, 9)
assert os.waitpid(orphan, 0) == (orphan, 9)
""")


@needs_root
def test_an_empty_bounding_set_takes_nothing_now_and_all_at_the_next_exec():
    printed = run_python("""
before = sets()
prctl.empty_bounding_set()
assert sets()["Bnd"] == 0
assert sets()["Eff"] == before["Eff"]
os.execv("/bin/grep", ["grep", "CapEff", "/proc/self/status"])
""")
    assert int(printed.split()[1], 16) == 0
