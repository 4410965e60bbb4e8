"""The lab's parts that can be tested without booting, and one boot for whoever asks for it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import apt, channel, disks, guest, hosts, parcel, roots, run, wheels
from lab.channel import Decoder, Kind
from lab.console import Console, Sign
from lab.errors import LabError, LabUnavailableError
from lab.machine import Hardware, qemu_command

DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
URIs: http://mirror.example/security
Suites: bookworm-security

Types: deb
Enabled: no
URIs: http://mirror.example/off
Suites: bookworm
"""
ONE_LINE = """\
# deb http://mirror.example/commented bookworm main
deb [arch=amd64 signed-by=/etc/apt/keyrings/k.gpg] http://mirror.example/debian bookworm main
deb-src http://mirror.example/debian bookworm main
"""


@pytest.fixture
def apt_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "apt"
    (directory / "sources.list.d").mkdir(parents=True)
    (directory / "sources.list.d/debian.sources").write_text(DEB822)
    return directory


def release(tmp_path: Path, text: str = 'ID=debian\nVERSION_CODENAME="bookworm"\n') -> Path:
    path = tmp_path / "os-release"
    path.write_text(text)
    return path


def test_deb822_sources_are_read_without_the_disabled() -> None:
    found = [(source.uri, source.suite) for source in apt.parse_deb822(DEB822)]
    assert found == [
        ("http://mirror.example/debian", "bookworm"),
        ("http://mirror.example/debian", "bookworm-updates"),
        ("http://mirror.example/security", "bookworm-security"),
    ]


def test_one_line_sources_are_read_with_their_keyring() -> None:
    (source,) = apt.parse_list(ONE_LINE)
    assert source == apt.Source(
        "http://mirror.example/debian", "bookworm", "/etc/apt/keyrings/k.gpg"
    )


def test_another_suite_is_found_at_the_machines_own_mirrors(
    apt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(apt.MIRROR_VARIABLE, raising=False)
    found = apt.sources_for("trixie", apt_directory, release(tmp_path))
    assert [source.suite for source in found] == ["trixie", "trixie-updates", "trixie-security"]
    assert found[2].uri == "http://mirror.example/security"


def test_machine_that_is_not_debian_needs_a_mirror_by_name(
    apt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(apt.MIRROR_VARIABLE, raising=False)
    other = release(tmp_path, "ID=ubuntu\nVERSION_CODENAME=bookworm\n")
    with pytest.raises(LabUnavailableError, match=apt.MIRROR_VARIABLE):
        apt.sources_for("trixie", apt_directory, other)
    monkeypatch.setenv(apt.MIRROR_VARIABLE, "http://mirror.example/d")
    (source,) = apt.sources_for("trixie", apt_directory, other)
    assert (source.uri, source.suite) == ("http://mirror.example/d", "trixie")


def test_frames_survive_any_cut_of_the_stream() -> None:
    sent = [(Kind.OUTPUT, b"x" * 300), (Kind.EXIT, b"{}"), (Kind.FILE, b"a\0b")]
    stream = b"".join(channel.frame(kind, payload) for kind, payload in sent)
    for size in (1, 3, 64, len(stream)):
        decoder, found = Decoder(), []
        for at in range(0, len(stream), size):
            found += decoder.feed(stream[at : at + size])
        assert found == sent


def test_damaged_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        Decoder().feed(b"O\xff\xff\xff\xff")


def test_torn_frame_is_an_end() -> None:
    whole = channel.frame(Kind.OUTPUT, b"abc")
    assert channel.read_frame(io.BytesIO(whole).read) == (Kind.OUTPUT, b"abc")
    for cut in range(len(whole)):
        assert channel.read_frame(io.BytesIO(whole[:cut]).read) is None


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        (b"[1.0] Kernel panic - not syncing: sysrq triggered crash\n", {Sign.PANIC}),
        (b"[1.0] Kernel panic - not syncing: no newline", {Sign.PANIC}),
        (b"[1.0] Out of memory: Killed process 7 (python3)\n", {Sign.GUEST_OOM}),
        (b"[1.0] Memory cgroup out of memory: Killed process 7 (python3)\n", set()),
        (b"debian12 login: \n", set()),
    ],
)
def test_console_tells_the_guests_end_from_a_limits_kill(
    tmp_path: Path, text: bytes, signs: set[Sign]
) -> None:
    path = tmp_path / "console.log"
    console = Console(path)
    assert console.look() == {}
    # In two parts: a line may be read while it is written.
    path.write_bytes(text[:20])
    console.look()
    path.write_bytes(text)
    assert set(console.look()) == signs


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The lab's end of a socket that a real agent serves, without systemd around commands."""
    monkeypatch.setattr(guest, "_ordinary_oom_score", lambda: None)
    ours, theirs = socket.socketpair()
    port = theirs.makefile("rwb", buffering=0)
    server = threading.Thread(target=guest.serve, args=(port, []))
    server.start()
    ours.settimeout(30)
    yield ours
    ours.shutdown(socket.SHUT_WR)
    server.join(30)
    assert not server.is_alive()
    port.close()
    theirs.close()
    ours.close()


def ask(
    agent: socket.socket, argv: list[str], files: tuple[str, ...] = ()
) -> list[tuple[Kind, bytes]]:
    job = {"argv": argv, "directory": "/", "environment": {"GREETING": "hi"}, "files": files}
    agent.sendall(channel.json_frame(Kind.RUN, job))
    found: list[tuple[Kind, bytes]] = []
    while not found or found[-1][0] is not Kind.EXIT:
        received = channel.read_frame(agent.recv)
        assert received is not None
        found.append(received)
    return found


def test_agent_sends_output_then_files_then_status(agent: socket.socket, tmp_path: Path) -> None:
    wanted = tmp_path / "junit.xml"
    script = f"echo $GREETING; echo err >&2; printf done > {wanted}; exit 3"
    found = ask(agent, ["/bin/sh", "-c", script], (str(wanted), str(tmp_path / "absent")))
    output = b"".join(payload for kind, payload in found if kind is Kind.OUTPUT)
    assert output == b"hi\nerr\n"
    assert found[-2] == (Kind.FILE, os.fsencode(wanted) + b"\0done")
    assert json.loads(found[-1][1]) == {"status": 3}


def test_agent_tells_a_signal_and_serves_the_next_command(agent: socket.socket) -> None:
    assert json.loads(ask(agent, ["/bin/sh", "-c", "kill -9 $$"])[-1][1]) == {
        "status": -signal.SIGKILL
    }
    assert json.loads(ask(agent, ["/nonexistent"])[-1][1]) == {"status": 127}
    assert json.loads(ask(agent, ["/bin/true"])[-1][1]) == {"status": 0}


def make_checkout(directory: Path) -> Path:
    for name in ("pyproject.toml", "supervisor/a.py", ".venv/lib/x.py", "build/b", "__pycache__/c"):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (directory / "link").symlink_to("supervisor")
    return directory


def test_checkout_without_git_goes_without_what_is_made_there(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    assert parcel.checkout_files(checkout) == ["link", "pyproject.toml", "supervisor/a.py"]


def test_checkout_with_git_goes_as_it_is_now(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / ".gitignore").write_text(".venv/\nbuild/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "add", "."], cwd=checkout, check=True)
    (checkout / "supervisor/a.py").unlink()
    (checkout / "new").touch()
    assert parcel.checkout_files(checkout) == [".gitignore", "link", "new", "pyproject.toml"]


def test_parcel_holds_agent_checkout_wheel_and_what_goes_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(source: Path, target: Path, cache: Path) -> Path:
        assert (source / "pyproject.toml").exists()
        target.mkdir()
        (target / "stockade-1-py3-none-any.whl").touch()
        return target / "stockade-1-py3-none-any.whl"

    monkeypatch.setattr(wheels, "build", build)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/notes").touch()
    checkout = make_checkout(tmp_path / "checkout")
    target = tmp_path / "parcel.tar"
    parcel.write(target, tmp_path, [tmp_path / "shared"], checkout)
    with tarfile.open(target) as tar:
        names = tar.getnames()
        assert tar.getmember("stockade/link").issym()
    assert {"lab/guest.py", "lab/channel.py", "stockade/supervisor/a.py", "beside/shared/notes",
            "wheel/stockade-1-py3-none-any.whl"} <= set(names)  # fmt: skip
    with pytest.raises(LabError, match="not a folder"):
        parcel.write(target, tmp_path, [tmp_path / "absent"], checkout)


def test_agent_installs_a_wheel_with_modes_and_script(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    packages = venv / "lib/python3.11/site-packages"
    (venv / "bin").mkdir(parents=True)
    (packages / "stockade/old").mkdir(parents=True)
    wheel = tmp_path / "stockade-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        launcher = zipfile.ZipInfo("stockade/sandbox/launcher")
        launcher.external_attr = 0o100755 << 16
        archive.writestr(launcher, "program")
        archive.writestr("stockade-1.0.dist-info/METADATA", "Name: stockade\nVersion: 1.0\n")
        archive.writestr(
            "stockade-1.0.dist-info/entry_points.txt", "[console_scripts]\nstockade = a.b:main\n"
        )
    guest.install(wheel, venv)
    assert (packages / "stockade/sandbox/launcher").stat().st_mode & 0o777 == 0o755
    assert not (packages / "stockade/old").exists()
    assert "from a.b import main" in (venv / "bin/stockade").read_text()
    assert os.access(venv / "bin/stockade", os.X_OK)


def test_key_names_all_that_an_image_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts.HOSTS["debian12"]
    assert roots.key(host) == roots.key(host)
    assert roots.key(host) != roots.key(hosts.HOSTS["debian13"])
    before = roots.key(host)
    monkeypatch.setattr(wheels, "requirements", lambda: ["another"])
    assert roots.key(host) != before


def test_old_images_and_half_made_ones_are_removed(tmp_path: Path) -> None:
    host = hosts.HOSTS["debian12"]
    for age, name in enumerate(
        ("debian12-c", "debian12-b", "debian12-a", ".debian12-half", "debian13-x")
    ):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    roots.prune(tmp_path, host)
    assert sorted(os.listdir(tmp_path)) == ["debian12-b", "debian12-c", "debian13-x"]


def test_wheels_are_taken_for_the_hosts_python(tmp_path: Path) -> None:
    binary, source = wheels.download_commands(["pip"], hosts.HOSTS["debian13"], tmp_path)
    assert binary[binary.index("--python-version") + 1] == "3.13"
    assert not any(text.startswith("python-prctl") for text in binary)
    assert any(text.startswith("python-prctl") for text in source)


def test_node_ids_come_from_a_file_one_a_line(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("tests/a.py::test_x[a b]\n\ntests/b.py::test_y\n")
    assert run.expand(["-q", f"@{names}"]) == [
        "-q", "tests/a.py::test_x[a b]", "tests/b.py::test_y",
    ]  # fmt: skip
    with pytest.raises(LabError, match="absent"):
        run.expand(["@absent"])


def test_guest_has_no_network_and_dies_with_the_lab(tmp_path: Path) -> None:
    command = qemu_command(
        hosts.HOSTS["debian12"], roots.Image(tmp_path), Hardware(), disk=tmp_path / "disk",
        parcel_file=tmp_path / "parcel", channel_path=tmp_path / "channel", console=[],
        cache_mode="unsafe",
    )  # fmt: skip
    assert command[:3] == ["setpriv", "--pdeathsig", "KILL"]
    assert command[command.index("-nic") + 1] == "none"
    assert "kvm" not in command[command.index("-accel") + 1]


def test_crash_kills_only_what_has_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCKADE_LAB_CACHE", str(tmp_path))
    (tmp_path / "disks").mkdir()
    host = hosts.HOSTS["debian12"]
    disk = tmp_path / "disks/debian12-main.0123.qcow2"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*sleep, str(disk)]) as machine, subprocess.Popen(sleep) as other:
        try:
            with disks.in_use(disk, other.pid):
                assert disks.crash(host, "main") == 0
            with disks.in_use(disk, machine.pid):
                assert disks.crash(host, "main") == 1
            assert machine.wait(30) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            machine.kill()
            other.kill()


def test_needs_skip_with_their_reason_and_are_listed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.needs_kernel(99, 1)\ndef test_new(): pass\n"
        "@pytest.mark.needs_kernel(3, 0)\ndef test_old(): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    listed = tmp_path / "listed"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "lab.needs", "-rs", "--strict-markers",
         "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--lab-list", str(listed), "."],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(hosts.LAB.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "needs Linux 99.1" in ended.stdout
    assert "1 passed, 2 skipped" in ended.stdout
    assert listed.read_text() == "test_it.py::test_new\n"


@pytest.mark.skipif(
    not os.environ.get("STOCKADE_LAB_BOOT"), reason="takes minutes: set STOCKADE_LAB_BOOT=1"
)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(hosts.HOSTS))
def test_disk_survives_a_pulled_plug_and_a_panic_is_told(name: str) -> None:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("needs qemu")
    lab = [sys.executable, str(hosts.LAB / "lab")]

    def execute(script: str) -> int:
        command = [*lab, "exec", name, "--disk", "test", "--timeout", "300", "--", "sh", "-c"]
        return subprocess.run([*command, script], check=False).returncode

    # Written through to the disk, and then the end without a shutdown.
    panic = "echo kept > /root/kept; sync; echo 1 > /proc/sys/kernel/sysrq; "
    panic += "echo c > /proc/sysrq-trigger"
    try:
        assert execute(panic) == run.EXIT_PANIC
        assert execute("grep -q kept /root/kept && exit 7") == 7
    finally:
        for path in (roots.cache_directory() / "disks").glob(f"{name}-test.*"):
            path.unlink()
