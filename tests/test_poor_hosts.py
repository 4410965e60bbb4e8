"""Stockade where it gets little: as an ordinary user, and where the cgroup tree cannot be written.

Each case runs the real command line in a mount namespace of its own, made poor there. Nothing of
the host's is changed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_process import make_place, processes_that_name

from stockade.platform import cgroup

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a mount namespace")

USER = 65534
DEADLINE_S = 60
STOCKADE = f"{shlex.quote(sys.executable)} -m stockade.supervisor.cli.main"


def open_the_way(path: str) -> list[str]:
    """Commands that let other users reach ``path`` below directories that only root may enter.

    Over the first such directory goes an empty one that holds nothing but the way to ``path``.
    """
    parts = Path(path).resolve().parts
    for depth in range(2, len(parts) + 1):
        closed = Path(*parts[:depth])
        if not closed.stat().st_mode & 0o001:
            here = shlex.quote(path)
            return [
                "hidden=$(mktemp -d)",
                f"mount --bind {here} $hidden",
                f"mount -t tmpfs -o mode=0755 none {shlex.quote(str(closed))}",
                f"mkdir -p {here}",
                f"mount --bind $hidden {here}",
                "umount $hidden",
                "rmdir $hidden",
            ]
    return []


class PoorHost:
    """A way to run commands on a host that lacks something."""

    def __init__(self, *, preparation: list[str], user: int | None, profile: str) -> None:
        self.place = make_place()
        self.place.chmod(0o777)
        self._lines = ["set -e", *preparation]
        self.user = user
        self.profile = profile
        self.drop = ""

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        become = (
            f"setpriv --reuid {self.user} --regid {self.user} --clear-groups --inh-caps=-all "
            if self.user is not None
            else self.drop
        )
        environment = f"env -i PATH=/usr/bin:/bin HOME={self.place} TMPDIR={self.place}"
        script = "\n".join(
            [*self._lines, f"cd {self.place}", f"exec {become}{environment} {command}"]
        )
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", "-c", script],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def stockade(self, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        """``stockade run --json``, and the outcome."""
        done = self.run(f"{STOCKADE} run --json --profile {self.profile} {shlex.join(arguments)}")
        lines = done.stderr.splitlines()
        assert lines, done
        outcome = json.loads(lines[-1])
        assert isinstance(outcome, dict)
        return done, outcome


def read_only_cgroups() -> list[str]:
    mount = cgroup.find_mount()
    if mount is None:
        return []
    path = shlex.quote(os.fsdecode(mount))
    return [f"mount --bind {path} {path}", f"mount -o remount,bind,ro {path}"]


@pytest.fixture(
    params=[
        "user",
        "user without cgroups",
        "user without cgroups in profile process",
        "root with read-only cgroups",
        "root without mounts",
    ]
)
def host(request: pytest.FixtureRequest) -> Iterator[PoorHost]:
    preparation = []
    user = None
    if "read-only" in request.param or "without cgroups" in request.param:
        preparation += read_only_cgroups()
    if "user" in request.param:
        user = USER
        preparation += open_the_way(sys.base_prefix)
        preparation += open_the_way(str(Path(__file__).parents[1]))
    profile = "process" if "process" in request.param else "private"
    poor = PoorHost(preparation=preparation, user=user, profile=profile)
    if "without mounts" in request.param:
        poor.drop = "setpriv --bounding-set -sys_admin --inh-caps -sys_admin "
    yield poor
    assert not processes_that_name(str(poor.place))
    left = [path for path in poor.place.rglob("*") if "stockade" in path.name]
    assert not left
    subprocess.run(["rm", "-rf", poor.place], check=True)


def test_command_runs_and_says_what_is_not_enforced(host: PoorHost) -> None:
    done, outcome = host.stockade("--", "bash", "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert (outcome["status"], outcome["exit_code"]) == ("failed", 3)
    assert "memory_max" in outcome["degraded"]
    assert ("own_uid" in outcome["degraded"]) == (host.user is not None)
    assert "not fully enforced on this host" in done.stderr


def test_namespaces_are_used_where_the_host_has_them_and_missed_aloud_elsewhere(
    host: PoorHost,
) -> None:
    done, outcome = host.stockade("--", "bash", "-c", "ls -d /proc/[0-9]* | wc -l; ls -A /root")
    has_namespaces = host.profile == "private" and not host.drop
    # Its own three processes, or all of the host's.
    assert (int(done.stdout.split()[0]) <= 3) == has_namespaces
    assert ("namespaces" in outcome["degraded"]) == bool(host.drop)
    assert ("namespaces" in done.stderr) == bool(host.drop)


def test_profile_that_cannot_be_held_is_refused_when_asked_to(host: PoorHost) -> None:
    done = host.run(
        f"{STOCKADE} run --profile sealed --on-unsupported refuse --memory-max infinity "
        "--memory-swap-max infinity --tasks-max infinity -- true"
    )
    assert done.returncode == 125
    lacking = "namespaces" if host.drop else "own_uid" if host.user is not None else "cgroup_kill"
    assert f"cannot enforce {lacking}" in done.stderr


def test_timeout_ends_escaped_children_too(host: PoorHost) -> None:
    script = "(setsid sleep 41001 &); sleep 41002"
    done, outcome = host.stockade("--timeout", "1s", "--", "bash", "-c", script)
    assert (done.returncode, outcome["status"]) == (124, "timeout")
    assert not processes_that_name("4100")


def test_what_is_left_behind_is_gone_at_the_end(host: PoorHost) -> None:
    script = "(setsid sleep 41003 &); nohup sleep 41004 >/dev/null 2>&1 & echo done"
    done, outcome = host.stockade("--", "bash", "-c", script)
    assert (done.stdout, outcome["status"]) == ("done\n", "success")
    assert not processes_that_name("4100")


def test_memory_limit_is_held_by_the_watchdog(host: PoorHost) -> None:
    script = "x = bytearray(300 << 20); import time; time.sleep(41)"
    done, outcome = host.stockade("--memory-max", "64M", "--", "python3", "-c", script)
    assert (done.returncode, outcome["error_code"]) == (137, "oom_killed")
    assert "watchdog" in outcome["reason"]


def test_fork_bomb_is_held_and_ends(host: PoorHost) -> None:
    bomb = ":(){ :|:& };:; sleep 1 #41005"
    done, outcome = host.stockade("--tasks-max", "24", "--timeout", "5s", "--", "bash", "-c", bomb)
    assert outcome["status"] in ("success", "failed", "timeout"), done
    assert not processes_that_name("41005")


def test_process_that_forks_and_setsids_for_ever_dies(host: PoorHost) -> None:
    comet = "import os\nwhile 1:\n  if os.fork(): os._exit(0)\n  os.setsid()\n#41006"
    _, outcome = host.stockade("--tasks-max", "24", "--timeout", "1s", "--", "python3", "-c", comet)
    assert outcome["status"] in ("success", "timeout")
    assert not processes_that_name("41006")


def test_quota_that_cannot_be_held_is_said_and_does_not_stop_the_command(host: PoorHost) -> None:
    done, outcome = host.stockade("--workdir-max", "1M", "--", "sh", "-c", "echo x >f; cat f")
    assert (done.returncode, done.stdout) == (0, "x\n"), done
    assert ("workdir_max" in outcome["degraded"]) == (host.user is not None or bool(host.drop))


def test_proof_tells_contained_from_not_enforced_and_fails_for_none(host: PoorHost) -> None:
    done = host.run(f"{STOCKADE} doctor --prove --json")
    assert done.returncode == 0, done
    told = {entry["name"]: entry for entry in json.loads(done.stdout)["proof"]["tasks"]}
    assert {"contained", "not enforced"} == {entry["verdict"] for entry in told.values()}
    assert told["memory"]["verdict"] == "contained"
    assert "watchdog" in told["memory"]["evidence"]
    assert told["cpu"]["evidence"].startswith("cpu_quota: ")
    # Held by namespaces, which a user has too; the quota takes root, and both take mounts.
    lacks_mounts = bool(host.drop)
    assert (told["host-files"]["verdict"] == "not enforced") == lacks_mounts
    lacks_quota = lacks_mounts or host.user is not None
    assert (told["disk"]["verdict"] == "not enforced") == lacks_quota


def test_worker_refuses_to_start_with_less_and_says_how_to_mend_it(host: PoorHost) -> None:
    done = host.run(
        f"{STOCKADE} worker --state-dir {host.place}/s --runtime-dir {host.place}/r "
        "--listen 127.0.0.1:0"
    )
    assert done.returncode == 78
    assert "memory_max" in done.stderr
    assert "Traceback" not in done.stderr
    for name in ("s", "r"):
        subprocess.run(["rm", "-rf", host.place / name], check=True)


def test_doctor_tells_what_is_missing(host: PoorHost) -> None:
    done = host.run(f"{STOCKADE} doctor")
    assert "memory_max" in done.stdout
    assert "to mend:" in done.stdout


def test_homes_that_links_lead_to_are_hidden_where_they_are() -> None:
    linked = PoorHost(preparation=[], user=None, profile="private")
    root = linked.place / "root"
    linked._lines += [
        f"mkdir {root}",
        f"mount -t tmpfs -o mode=0755 none {root}",
        f"mkdir {root}/homes",
        "for path in /*; do",
        "  name=${path#/}",
        '  case $name in home|root) name=homes/$name; ln -s "$name" ' + f"{root}$path;; esac",
        f'  if [ -L "$path" ]; then cp -a "$path" {root}/',
        f'  elif [ -d "$path" ]; then mkdir "{root}/$name"; mount --rbind "$path" "{root}/$name"',
        "  fi",
        "done",
    ]
    linked.drop = f"chroot {root} "
    done, outcome = linked.stockade("--", "sh", "-c", "ls -A /home/ /root/ /homes/*; ls /homes")
    assert "namespaces" not in outcome["degraded"], done.stderr
    lists = "/home/:\n\n/homes/home:\n\n/homes/root:\n\n/root/:\n"
    assert done.stdout == f"{lists}home\nroot\n"
    subprocess.run(["rm", "-rf", linked.place], check=True)
