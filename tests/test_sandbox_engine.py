"""The engine's command lines and the reading of its answers: no engine needed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.sandbox.engine import Engine, EngineSettings, RunLine
from stockade.sandbox.engine_flags import ALLOWED_BY_DEFAULT, KNOWN, Arguments, Policy, parse
from stockade.sandbox.engine_state import ContainerState, container_outcome
from stockade.sandbox.errors import ContainerRefusedError
from stockade.sandbox.limits import MIB, Limits
from stockade.sandbox.outcome import ErrorCode, Outcome, Status
from stockade.sandbox.settings import SpawnerSettings

DEFAULT = Policy(ALLOWED_BY_DEFAULT, ())
SETTINGS = EngineSettings("/usr/bin/docker", "/run/docker.sock")


def line(*words: str, settings: EngineSettings = SETTINGS, **changes: Any) -> RunLine:
    return Engine(settings, "worker-1").run(
        **{
            "seq": 7,
            "instance_id": "task-7-1",
            "image": "app:1",
            "words": [word.encode("utf-8", "surrogateescape") for word in words],
            "environment": [b"SHARD_NO=0"],
            "limits": Limits(),
            "profile": "process",
            **changes,
        }
    )


def text(found: RunLine) -> list[str]:
    return [word.decode("utf-8", "surrogateescape") for word in found.argv]


# The line


def test_clients_environment_needs_no_account_of_the_workers_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0x7FFFFFF0)
    found = Engine(SETTINGS, "worker-1").environment
    assert (found["HOME"], found["DOCKER_CONFIG"]) == ("/", "/.docker")


def test_line_has_name_labels_limits_and_the_command_after_the_image() -> None:
    limits = Limits(memory_max=64 * MIB, memory_swap_max=MIB, cpu_quota=0.5, tasks_max=20,
                    cpu_weight=200, timeout_stop=2.6, limit_nofile=16)  # fmt: skip
    found = line("-e", "A=b", "--workdir", "/x", "sh", "-c", "echo hi", limits=limits)
    assert found.name == "stockade-worker-1-7-task-7-1"
    assert text(found) == [
        "/usr/bin/docker", "--host", "unix:///run/docker.sock", "run",
        "--name=stockade-worker-1-7-task-7-1", "--label=stockade.worker=worker-1",
        "--label=stockade.instance=task-7-1", "--label=stockade.seq=7", "--pull=missing",
        "--log-driver=none", "--init", f"--memory={64 * MIB}b", f"--memory-swap={65 * MIB}b",
        "--cpus=0.500", "--cpu-shares=2048", "--pids-limit=20", "--ulimit=nofile=16:16",
        "--ulimit=core=1:1", "--stop-timeout=3", "--network=bridge", "--env-file=/dev/stdin",
        "--workdir=/x", "app:1", "sh", "-c", "echo hi",
    ]  # fmt: skip
    assert found.environment_file == b"A=b\nSHARD_NO=0\n"


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("process", ["--network=net1"]),
        ("private", ["--network=net1", "--security-opt=no-new-privileges"]),
        ("sealed", ["--network=none", "--security-opt=no-new-privileges", "--cap-drop=ALL"]),
    ],
)
def test_network_goes_by_profile(profile: str, expected: list[str]) -> None:
    settings = EngineSettings("/usr/bin/docker", "/s", network="net1")
    words = text(line(profile=profile, settings=settings))
    found = [w for w in words if w.startswith(("--network", "--security", "--cap"))]
    assert found == expected


def test_podman_is_spoken_to_by_its_socket_only() -> None:
    settings = EngineSettings("/usr/bin/podman", "/run/podman/podman.sock")
    assert text(line(settings=settings))[:4] == [
        "/usr/bin/podman", "--remote", "--url", "unix:///run/podman/podman.sock",
    ]  # fmt: skip


@given(st.text(max_size=300), st.text(min_size=1, max_size=80))
def test_any_instance_and_worker_id_makes_a_safe_name(instance_id: str, worker_id: str) -> None:
    found = Engine(SETTINGS, worker_id).run(
        seq=1, instance_id=instance_id, image="a", words=[], environment=[], limits=Limits(),
        profile="process",
    )  # fmt: skip
    assert set(found.name) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
    )
    assert len(found.name) < 255
    assert found.name.startswith("stockade-")


def test_ids_that_differ_only_in_unsafe_characters_have_different_names() -> None:
    names = {line(instance_id=text).name for text in ("../x", "..:x", "..;x", ".._x")}
    assert len(names) == 4


@pytest.mark.parametrize(
    "image",
    ["", "-v", "--privileged", "a b", "A", "a:", "a@b", "/x", "dir:/etc", "oci-archive:/x.tar",
     "docker-archive:/x", "docker://a", "a\nb", "a;b", "../a", "a" * 600],
)  # fmt: skip
def test_image_that_is_no_reference_is_refused(image: str) -> None:
    with pytest.raises(ContainerRefusedError, match="image"):
        line(image=image)


@pytest.mark.parametrize(
    "image",
    ["a", "a/b", "registry.example:5000/a/b-c:1.0_x", "localhost/a", "a@sha256:" + "0" * 64,
     "[::1]:5000/a", "stockade-test:1", "a__b/c.d"],
)  # fmt: skip
def test_image_references_are_taken(image: str) -> None:
    assert image in text(line(image=image))


def test_what_a_line_of_a_file_cannot_hold_goes_beside_it() -> None:
    environment = [b"A=plain", b"B=two\nlines", b"C=carriage\r", b"D=" + b"x" * 40_000, b"E=\xff"]
    found = line(environment=environment)
    assert found.environment_file == b"A=plain\n"
    beside = [word for word in found.argv if word.startswith(b"--env=")]
    assert beside == [b"--env=" + entry for entry in environment[1:]]


def test_the_workers_variables_win_over_the_tasks() -> None:
    found = line("--env=SHARD_NO=9", "--env=X=1", "-eY=2", "-e=Z=3")
    assert found.environment_file == b"SHARD_NO=0\nX=1\nY=2\nZ=3\n"


# The flags


def test_first_word_that_is_no_flag_ends_the_flags() -> None:
    expected = Arguments(("--user=1",), {}, ("sh", "--privileged", "-v", "/:/x"))
    assert parse(["-u", "1", "sh", "--privileged", "-v", "/:/x"], DEFAULT) == expected
    assert parse(["--user=1", "--", "sh", "--privileged", "-v", "/:/x"], DEFAULT) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--privileged"], ["--privileged=true"], ["--device", "/dev/sda"], ["--device=/dev/sda"],
        ["--pid=host"], ["--pid", "host"], ["--ipc=host"], ["--uts=host"], ["--userns=host"],
        ["--cgroupns=host"], ["--network=host"], ["--net", "host"], ["--network", "container:x"],
        ["--cap-add=ALL"], ["--security-opt", "seccomp=unconfined"], ["--volumes-from", "x"],
        ["--mount", "type=bind,src=/,dst=/x"], ["-v", "/:/host"], ["--volume=/etc:/x"],
        ["-v/var/run/docker.sock:/s"], ["--env-file", "/etc/shadow"], ["--label-file=/etc/shadow"],
        ["--cidfile", "/tmp/x"], ["--name", "x"], ["--label=stockade.worker=other"], ["--rm"],
        ["-d"], ["--detach"], ["-it"], ["-i"], ["-t"], ["--restart=always"], ["--memory=10g"],
        ["-m", "10g"], ["--memory-swap=-1"], ["--cpus", "64"], ["--pids-limit=-1"],
        ["--ulimit=nofile=1"], ["--oom-kill-disable"], ["--gpus=all"], ["--runtime=x"],
        ["--sysctl=a=b"], ["--cgroup-parent=/"], ["-p", "80:80"], ["-P"], ["--publish-all"],
        ["--stop-timeout=9999"], ["--log-driver=syslog"], ["--pull=always"], ["--init=false"],
        ["--add-host=a:1"], ["--hostname=x"], ["--tmpfs=/x"], ["--read-only"], ["--cap-drop=x"],
        ["--Privileged"], ["--priv"], ["---"], ["-"], ["--=x"], ["-=x"], ["--unknown"],
        ["--env"], ["-e"], ["--env", "HOME"], ["--env="], ["--env==x"], ["-e", "A B=c"],
        ["--user"], ["--env-host"], ["--rootfs"], ["--env-merge=A=b"], ["--workdir"],
        ["-e", "A=b", "--privileged"], ["-eA=b", "-u", "0", "--device=/dev/kvm", "sh"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_is_not_allowed_is_refused_with_a_reason(words: list[str]) -> None:
    with pytest.raises(ContainerRefusedError) as caught:
        parse(words, DEFAULT)
    assert len(str(caught.value)) >= 20


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--privileged", "it would give the task power over the host"),
        ("--pid=host", "it would give the task power over the host"),
        ("--memory=1g", "limits are the dispatch's `limits`"),
        ("--name=x", "it is the worker's to set"),
        ("--env-file=/etc/shadow", "files of the host"),
        ("--strange", "it is not on the list; allowed are --entrypoint, --env, --user"),
    ],
)
def test_reason_says_why_and_what_is_allowed(word: str, reason: str) -> None:
    with pytest.raises(ContainerRefusedError, match="is not allowed") as caught:
        parse([word], DEFAULT)
    assert reason in str(caught.value)


def test_configuration_allows_more_and_less() -> None:
    with pytest.raises(ContainerRefusedError, match="allowed are none"):
        parse(["--env=A=b"], Policy((), ()))
    found = parse(["--read-only", "--tmpfs", "/x", "-h", "name"], Policy(tuple(KNOWN), ()))
    assert found.flags == ("--read-only", "--tmpfs=/x", "--hostname=name")
    with pytest.raises(ContainerRefusedError, match="takes no value"):
        parse(["--read-only=false"], Policy(tuple(KNOWN), ()))


@given(st.lists(st.text(max_size=20), max_size=6))
def test_whatever_is_asked_the_engine_sees_allowed_flags_only(words: list[str]) -> None:
    try:
        found = parse(words, DEFAULT)
    except ContainerRefusedError:
        return
    assert all(flag.startswith(("--entrypoint=", "--user=", "--workdir=")) for flag in found.flags)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """ok/ is allowed; out/ is not; ok/link leads to out/."""
    (tmp_path / "ok/in").mkdir(parents=True)
    (tmp_path / "okay").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "ok/file").touch()
    (tmp_path / "ok/link").symlink_to(tmp_path / "out")
    (tmp_path / "ok/inner").symlink_to(tmp_path / "ok/in")
    (tmp_path / "ok/hidden/deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "ok/fifo")
    return tmp_path


def volume(tree: Path, text: str) -> Arguments:
    policy = Policy(("volume",), (str(tree / "ok"),), (str(tree / "ok/hidden"),))
    return parse(["-v", text.replace("@", str(tree))], policy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@/ok/in:/x", "@/ok/in:/x:rw"),
        ("@/ok/in:/x:ro", "@/ok/in:/x:ro"),
        ("@/ok/file:/x:ro", "@/ok/file:/x:ro"),
        ("@/ok/../ok/in/:/x", "@/ok/in:/x:rw"),
        ("@/ok/inner:/x", "@/ok/in:/x:rw"),
    ],
)
def test_volumes_below_an_allowed_path_are_mounted_as_they_really_are(
    tree: Path, text: str, expected: str
) -> None:
    assert volume(tree, text).flags == ("--volume=" + expected.replace("@", str(tree)),)


@pytest.mark.parametrize(
    "text",
    [
        "@/out:/x", "@/okay:/x", "@/ok/../out:/x", "@/ok/link:/x", "@/ok/link/../ok:/x", "/:/x",
        "@/ok:/x", "@/ok/hidden:/x", "@/ok/hidden/deep:/x", "@/ok/absent:/x", "@/ok/fifo:/x",
        "named:/x", "x", "", "@/ok/in", "@/ok/in:", "@/ok/in:relative", "@/ok/in:/x:rshared",
        "@/ok/in:/x:ro,z", "@/ok/in:/x:ro:ro", "./ok:/x", "~/x:/x", "@/ok/in,src=/:/x",
    ],
)  # fmt: skip
def test_volumes_elsewhere_are_refused(tree: Path, text: str) -> None:
    with pytest.raises(ContainerRefusedError, match="volume"):
        volume(tree, text)


def test_engines_socket_is_never_mounted_even_if_its_directory_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        settings = EngineSettings("/usr/bin/docker", str(path), volumes=(str(tmp_path),))
        for source in (path, tmp_path):
            with pytest.raises(ContainerRefusedError, match="not allowed"):
                line("-v", f"{source}:/x", settings=settings)
        other = EngineSettings("/usr/bin/docker", "/run/docker.sock", volumes=(str(tmp_path),))
        with pytest.raises(ContainerRefusedError, match="neither a directory nor a regular file"):
            line("-v", f"{path}:/x", settings=other)


# The answers


def state(**changes: Any) -> ContainerState:
    fields = {"Status": "exited", "Running": False, "ExitCode": 0, "OOMKilled": False,
              "Error": "", "StartedAt": "2026-01-01T00:00:00Z", **changes}  # fmt: skip
    host = {"Memory": 1, "PidsLimit": 1, "NanoCpus": 1}
    return ContainerState.parse(f"{json.dumps(fields)}\n{json.dumps(host)}\n")


def client(exited: int | None = None, **fields: Any) -> Outcome:
    if exited == 0:
        return Outcome(Status.SUCCESS, exit_code=0, **fields)
    return Outcome(
        **{"status": Status.FAILED, "error_code": ErrorCode.EXECUTE_FAILED, "exit_code": exited,
           **fields}
    )  # fmt: skip


CREATED = {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z", "ExitCode": 127}
LOST = {"error_code": ErrorCode.WORKER_LOST}
TIMEOUT = {"status": Status.TIMEOUT, "error_code": ErrorCode.TIMEOUT}


@pytest.mark.parametrize(
    ("by_client", "container", "code", "exit_code"),
    [
        (client(0), state(), ErrorCode.NONE, 0),
        (client(3), state(ExitCode=3), ErrorCode.EXECUTE_FAILED, 3),
        (client(125), state(ExitCode=125), ErrorCode.EXECUTE_FAILED, 125),
        (client(126), state(ExitCode=126), ErrorCode.EXECUTE_FAILED, 126),
        (client(127), state(ExitCode=127), ErrorCode.EXECUTE_FAILED, 127),
        (client(125), None, ErrorCode.SPAWN_FAILED, 125),
        (client(127), state(**CREATED), ErrorCode.SPAWN_FAILED, 127),
        (client(137), state(ExitCode=137), ErrorCode.EXECUTE_FAILED, 137),
        (client(137), state(ExitCode=137, OOMKilled=True), ErrorCode.OOM_KILLED, 137),
        (client(1), state(ExitCode=1, OOMKilled=True), ErrorCode.EXECUTE_FAILED, 1),
        (client(0), state(OOMKilled=True), ErrorCode.NONE, 0),
        (client(None, **LOST), state(ExitCode=5), ErrorCode.EXECUTE_FAILED, 5),
        (client(None, **LOST), state(), ErrorCode.NONE, 0),
        (client(None, **LOST), None, ErrorCode.WORKER_LOST, None),
        (client(None, **TIMEOUT), state(ExitCode=143), ErrorCode.TIMEOUT, 143),
        (client(None, **TIMEOUT), None, ErrorCode.TIMEOUT, None),
    ],
)
def test_outcome_is_the_containers_and_the_engines_failures_are_told_from_it(
    by_client: Outcome, container: ContainerState | None, code: ErrorCode, exit_code: int | None
) -> None:
    found = container_outcome(by_client, container, Limits(), "")
    assert (found.error_code, found.exit_code) == (code, exit_code)
    assert (found.status is Status.SUCCESS) == (code is ErrorCode.NONE)


def test_what_the_client_used_is_not_told_as_the_tasks() -> None:
    found = container_outcome(
        client(0, cpu_s=1.0, memory_peak_bytes=1, processes_peak=9, io_read_bytes=1), state(),
        Limits(), "",
    )  # fmt: skip
    assert (found.cpu_s, found.memory_peak_bytes, found.processes_peak) == (None, None, None)


def test_limits_that_the_engine_dropped_are_told() -> None:
    text = '{"Status": "exited", "ExitCode": 0}\n{"Memory": 0, "PidsLimit": null}'
    limits = Limits(memory_max=MIB, tasks_max=5, cpu_quota=None, io_weight=50)
    degraded = container_outcome(client(0), ContainerState.parse(text), limits, "").degraded
    assert degraded == ("memory_max", "tasks_max", "io_weight")


@pytest.mark.parametrize("text", ["", "{}", "{}\n{}", "null\nnull", "[]\n[]", "x\ny", '{"Status":'])
def test_answer_that_makes_no_sense_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read what the engine says"):
        ContainerState.parse(text)


def test_settings_travel_with_their_engine() -> None:
    settings = SpawnerSettings(
        worker_id="w", runtime_dir="/r", state_dir="/s", supervisor_uid=0, supervisor_gid=0,
        uid_min=1, uid_max=2, engine=EngineSettings("/d", "/s", volumes=("/v",)),
    )  # fmt: skip
    assert SpawnerSettings.from_json(settings.to_json()) == settings
