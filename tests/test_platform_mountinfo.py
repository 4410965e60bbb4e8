"""The table of mounts: its lines as the kernel writes them, and this host's own."""

import os
import subprocess
import sys

import pytest

from stockade.platform import mountinfo

LINE = (
    b"36 35 98:0 /mnt1 /mnt/with\\040space rw,noatime master:1 shared:7 - ext3 /dev/r\\134oot "
    b"rw,errors=continue"
)


def test_every_field_of_a_line_is_read():
    assert mountinfo.parse_line(LINE) == mountinfo.Mount(
        mount_id=36,
        parent_id=35,
        device=(98, 0),
        root="/mnt1",
        target="/mnt/with space",
        options=frozenset({"rw", "noatime"}),
        propagation=frozenset({"master:1", "shared:7"}),
        kind="ext3",
        source="/dev/r\\oot",
        super_options=frozenset({"rw", "errors=continue"}),
    )


def test_private_mount_has_no_propagation_and_source_may_be_empty():
    found = mountinfo.parse_line(b"1 0 0:5 / /a rw - tmpfs  rw")
    assert (found.propagation, found.source) == (frozenset(), "")


@pytest.mark.parametrize("line", [b"", b"1 2 3", LINE.replace(b" - ", b" "), b"1 0 0:5 / - x y z"])
def test_what_is_no_line_is_refused(line):
    with pytest.raises(ValueError, match="cannot read"):
        mountinfo.parse_line(line)


def test_own_table_has_the_root_and_proc():
    found = mountinfo.read_mounts()
    assert "/" in {one.target for one in found}
    assert ("/proc", "proc") in {(one.target, one.kind) for one in found}
    assert mountinfo.read_mounts(os.getpid()) == found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    "name", [b"a b", b"tab\there", b"new\nline", b"back\\slash", b"\\040", b"\xff\xfe", b"cr\rhere"]
)
def test_names_come_back_as_they_are(tmp_path, name):
    target = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(target)
    script = """
import os, sys
from stockade.platform import clone, mountinfo, mounts, namespaces
namespaces.unshare(clone.CLONE_NEWNS)
mounts.make_private("/")
mounts.mount(sys.argv[1], sys.argv[1], "tmpfs", 0)
found = mountinfo.read_mounts()[-1]
assert (found.target, found.source) == (sys.argv[1], sys.argv[1]), found
"""
    subprocess.run(
        [sys.executable.encode(), b"-c", script.encode(), target], check=True, timeout=60
    )
