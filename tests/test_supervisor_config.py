import contextlib
import os
import re
import socket
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade.sandbox.limits import MIB, Limits
from stockade.supervisor.config import KEYS, NO_DEFAULT, SECTIONS
from stockade.supervisor.config_defaults import default_file, host_defaults
from stockade.supervisor.config_load import ALIASES, load
from stockade.supervisor.config_values import HIDDEN
from stockade.supervisor.errors import ConfigError
from stockade.supervisor.limits import LIMIT_FIELDS
from stockade.supervisor.listen import (
    Address,
    SchedulerAddress,
    is_loopback,
    is_this_host,
    parse_address,
    parse_advertised,
    parse_scheduler,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "stockade.toml"
        path.write_text(text)
        return path

    return write_file


def refusal(path=None, environ=None, overrides=None):
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {}, overrides)
    return str(caught.value)


# Sources


def test_without_any_source_the_documented_defaults_are_in_force():
    loaded = load(None, {})
    assert loaded.config.limits == Limits()
    assert loaded.config.worker.id == socket.gethostname()
    assert loaded.config.worker.max_concurrency == 4 * len(os.sched_getaffinity(0))
    assert loaded.config.worker.uid_max == loaded.config.worker.uid_min + 65535
    assert loaded.config.http.listen == "127.0.0.1:8081"
    assert loaded.warnings == ()
    assert {source.split(" ")[0] for source in loaded.sources.values()} == {"default"}


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(write):
    path = write('[worker]\nid = "file"\nuser = "file"\nlog_level = "debug"\n')
    environ = {"STOCKADE_WORKER_ID": "env", "STOCKADE_WORKER_USER": "env"}
    loaded = load(path, environ, {"worker.id": "flag", "worker.labels": None})
    assert loaded.config.worker.id == "flag"
    assert loaded.config.worker.user == "env"
    assert loaded.config.worker.log_level == "debug"
    assert loaded.sources["worker.id"] == "flag --id"
    assert loaded.sources["worker.user"] == "environment STOCKADE_WORKER_USER"
    assert loaded.sources["worker.log_level"] == f"file {path}"
    assert loaded.sources["worker.labels"] == "default"


def test_every_key_has_an_environment_variable_of_its_own():
    names = [key.environment for key in KEYS.values()]
    assert len(set(names)) == len(names)
    assert KEYS["limits.max.memory_max"].environment == "STOCKADE_LIMITS_MAX_MEMORY_MAX"
    assert KEYS["task.shell.path"].environment == "STOCKADE_TASK_SHELL_PATH"


def test_every_default_can_be_set_by_file_environment_and_flag_to_the_same(write):
    plain = load(None, {}).config
    for key in KEYS.values():
        value = getattr(getattr(plain, key.section.replace(".", "_")), key.name)
        if value is None and not key.section.startswith("limits"):
            toml = '""'
        else:
            toml = key.kind.write(value)
        raw = tomllib.loads(f"x = {toml}")["x"]
        assert load(write(f"[{key.section}]\n{key.name} = {toml}\n"), {}).config == plain, key
        assert load(None, {}, {key.dotted: raw}).config == plain, key
        text = ",".join(raw) if isinstance(raw, list) else "" if raw == {} else str(raw)
        loaded = load(None, {key.environment: text})
        assert loaded.config == plain, key
        assert loaded.sources[key.dotted] == f"environment {key.environment}"


def test_lists_and_maps_are_read_from_the_environment_by_comma():
    environ = {
        "STOCKADE_WORKER_LABELS": "zone=a,rack=7=b",
        "STOCKADE_HTTP_ALLOW_NETWORKS": "10.0.0.0/8, fd00::/8",
    }
    config = load(None, environ).config
    assert config.worker.labels == {"zone": "a", "rack": "7=b"}
    assert config.http.allow_networks == ("10.0.0.0/8", "fd00::/8")


def test_an_empty_variable_empties_what_the_file_lists(write):
    path = write('[worker]\nlabels = { zone = "a" }\n[http]\nscheduler = "http://127.0.0.1:1"\n')
    environ = {"STOCKADE_WORKER_LABELS": "", "STOCKADE_HTTP_SCHEDULER": ""}
    config = load(path, environ).config
    assert (config.worker.labels, config.http.scheduler) == ({}, None)


def test_durations_sizes_and_percentages_are_texts_or_numbers(write):
    path = write(
        '[limits]\nmemory_max = "64M"\ncpu_quota = 0.5\nruntime_max = "2min"\n'
        '[limits.max]\ncpu_quota = "150%"\n[report]\nexcerpt = 2048\nretry_max = 15\n'
    )
    config = load(path, {}).config
    assert config.limits.memory_max == 64 * MIB
    assert (config.limits.cpu_quota, config.limits_max.cpu_quota) == (0.5, 1.5)
    assert config.limits.runtime_max == 120
    assert (config.report.excerpt, config.report.retry_max) == (2048, 15)


# What is refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[worker]\nstat_dir = "/x"', "key stat_dir in [worker]"),
        ('[worker]\nstat_dir = "/x"', "did you mean state_dir?"),
        ("[wroker]", "did you mean worker?"),
        ("[nats]", "known are grpc, http, limits, profile, report, task, worker"),
        ("[limits]\nmemory_mx = 1", "did you mean memory_max?"),
        ("[limits.max]\nmemory_mx = 1", "key memory_mx in [limits.max]"),
        ("[limits.mex]", "did you mean max?"),
        ("[task.shel]", "did you mean shell?"),
        ("limits = 5", "write [limits]"),
        ("[limits]\nmax = 5", "write [limits.max]"),
        ("id = 'x'", "unknown"),
    ],
)
def test_an_unknown_key_or_section_names_file_place_and_nearest(write, text, said):
    path = write(text)
    message = refusal(path)
    assert said in message
    assert str(path) in message


def test_an_unknown_variable_names_the_nearest_one_and_not_its_value():
    message = refusal(environ={"STOCKADE_LIMIT_MEMORY_MAX": "geheim"})
    assert "did you mean STOCKADE_LIMITS_MEMORY_MAX?" in message
    assert "geheim" not in message
    assert "did you mean" not in refusal(environ={"STOCKADE_QQQ": "1"})


def test_all_problems_are_told_at_once(write):
    path = write('[worker]\nfoo = 1\nmax_concurrency = "many"\n[limits]\nmemory_max = "x"\n')
    message = refusal(path, {"STOCKADE_FOO": "1"})
    assert len(message.splitlines()) == 4
    assert all(line.startswith("cannot use ") for line in message.splitlines())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("worker.id", ""),
        ("worker.id", "a/b"),
        ("worker.id", ".."),
        ("worker.id", "x" * 65),
        ("worker.id", "a\nb"),
        ("worker.id", 5),
        ("worker.user", "a\0b"),
        ("worker.state_dir", "relative"),
        ("worker.state_dir", "/a/../b"),
        ("worker.state_dir", ""),
        ("worker.max_concurrency", 0),
        ("worker.max_concurrency", 1.5),
        ("worker.max_concurrency", True),
        ("worker.max_concurrency", "infinity"),
        ("worker.labels", ["a"]),
        ("worker.labels", {"a": 1}),
        ("worker.labels", "a"),
        ("worker.drain_timeout", "-1s"),
        ("worker.drain_timeout", "infinity"),
        ("worker.on_unsupported", "ignore"),
        ("worker.uid_min", 0),
        ("worker.uid_min", 65_000),
        ("worker.uid_max", 2**32 - 1),
        ("worker.log_level", "loud"),
        ("profile.name", "open"),
        ("limits.tasks_max", 0),
        ("limits.timeout_stop", "infinity"),
        ("http.listen", "8081"),
        ("http.listen", "127.0.0.1:65536"),
        ("http.listen", "127.0.0.1"),
        ("http.listen", "127.0.0.300:80"),
        ("http.listen", "::1:80"),
        ("http.listen", "[::g]:80"),
        ("http.advertise", ":80"),
        ("http.scheduler", "scheduler:8080"),
        ("http.scheduler", "ftp://scheduler"),
        ("http.scheduler", "http://"),
        ("http.scheduler", "http://a:b"),
        ("http.scheduler", "http://a:99999"),
        ("http.scheduler", "http://a/?x=1"),
        ("grpc.listen", "9091"),
        ("grpc.scheduler", "scheduler"),
        ("grpc.scheduler", ":9090"),
        ("grpc.scheduler", "scheduler:0"),
        ("grpc.scheduler", "dns:///scheduler:9090"),
        ("grpc.allow_schedulers", ["http://a/b:9090"]),
        ("grpc.heartbeat_interval", 0),
        ("http.tls_cert", "/nonexistent/cert"),
        ("http.tls_key", "/nonexistent/key"),
        ("grpc.tls_ca", "relative.pem"),
        ("worker.protocol", "nats"),
        ("http.allow_networks", "10.0.0.1/8"),
        ("http.allow_networks", ["everyone"]),
        ("http.allow_networks", 5),
        ("http.token_file", "/nonexistent/token"),
        ("http.heartbeat_interval", 0),
        ("report.excerpt", "2M"),
        ("report.dialect", "cobol"),
        ("report.refused_tries", 0),
        ("task.shell.environment", {"A=B": "c"}),
        ("task.shell.environment", {"": "c"}),
        ("task.shell.environment", {"A": "b\0c"}),
        ("task.shell.environment", {"HOME": "/root"}),
        ("task.shell.environment", {"PATH": "/x"}),
        ("task.http.redirects_max", 1000),
        ("task.http.allow", ["10.0.0.1/8"]),
        ("task.http.deny", ["http://a/"]),
        ("task.http.deny", ["10.0.0.256"]),
        ("task.shell.interpreter", []),
        ("task.shell.interpreter", ["bash", "-c"]),
        ("task.shell.interpreter", ["/bin/bash", 1]),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_naming_its_key(key, value):
    message = refusal(overrides={key: value})
    assert message.startswith("cannot ")
    assert key in message


@settings(deadline=None)
@given(
    st.sampled_from(sorted(KEYS)),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.datetimes()
    | st.lists(st.text() | st.integers())
    | st.dictionaries(st.text(), st.text() | st.integers()),
)
def test_any_value_is_either_in_force_or_a_configuration_error(key, value):
    with contextlib.suppress(ConfigError):
        loaded = load(None, {}, {key: value})
        assert set(loaded.sources) == set(KEYS)


@pytest.mark.parametrize("content", [b"[", b"\xff\xfe", b"a = 1\na = 2", b"a = " + b"[" * 100_000])
def test_a_file_that_is_not_toml_is_refused(tmp_path, content):
    path = tmp_path / "stockade.toml"
    path.write_bytes(content)
    assert f"cannot read configuration {path}: " in refusal(path)


def test_a_file_that_is_missing_or_a_directory_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing.toml")
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("profile.read_write_paths", ["/"], "the whole system"),
        ("profile.read_only_paths", ["data"], "not an absolute path"),
        ("profile.private_network", "perhaps", "neither true nor false"),
    ],
)
def test_what_tasks_see_is_checked(key, value, reason):
    assert reason in refusal(overrides={key: value})


def test_no_message_repeats_a_secret(write):
    path = write('[task.shell]\nenvironment = { HOME = "geheim" }\n')
    environ = {
        "STOCKADE_HTTP_SCHEDULER": "http://user:geheim@10.0.0.1:8080",
        "STOCKADE_HTTP_ALLOW_SCHEDULERS": "http://user:geheim@10.0.0.1:x",
        "STOCKADE_TASK_SHELL_ENVIRONMENT": "geheim",
        "STOCKADE_UNKNOWN": "geheim",
        "SCHEDULER_URL": "geheim",
    }
    message = refusal(path, environ) + refusal(path)
    assert len(message.splitlines()) >= 4
    assert "geheim" not in message


# Limits


def test_an_unset_maximum_follows_the_default_but_runtime_max_is_unlimited():
    loaded = load(None, {}, {"limits.memory_max": "1G"})
    assert loaded.config.limits_max.memory_max == 1024 * MIB
    assert loaded.config.limits_max.runtime_max is None
    assert loaded.sources["limits.max.memory_max"] == "default (as limits.memory_max)"


def test_a_default_beyond_the_maximum_is_lowered_to_it():
    loaded = load(None, {"STOCKADE_LIMITS_MAX_MEMORY_MAX": "64M"})
    assert loaded.config.limits.memory_max == 64 * MIB
    assert loaded.sources["limits.memory_max"] == "default (lowered to limits.max.memory_max)"


@pytest.mark.parametrize(
    ("set_together", "told"),
    [
        (
            {"limits.memory_max": "1G", "limits.max.memory_max": "64M"},
            "cannot use limits.memory_max (flag --memory-max)",
        ),
        (
            {"limits.timeout_stop": "10s", "limits.runtime_max": "5s"},
            "grace after the deadline is longer than limits.runtime_max",
        ),
    ],
)
def test_a_limit_set_beyond_what_another_allows_is_refused_with_the_reason(set_together, told):
    assert told in refusal(overrides=set_together)


def test_the_default_grace_gives_way_to_a_shorter_run():
    loaded = load(None, {}, {"limits.runtime_max": "2s"})
    assert loaded.config.limits.timeout_stop == 2
    assert loaded.sources["limits.timeout_stop"] == "default (lowered to limits.runtime_max)"


# Uids and reports


def test_a_uid_range_smaller_than_max_concurrency_is_refused():
    overrides = {"worker.uid_min": 100_000, "worker.uid_max": 100_003, "worker.max_concurrency": 5}
    assert "a uid of its own" in refusal(overrides=overrides)
    load(None, {}, {**overrides, "worker.max_concurrency": 4})


def test_retry_min_longer_than_retry_max_is_refused():
    assert "report.retry_max" in refusal(overrides={"report.retry_min": "1min"})


def test_heartbeats_too_rare_and_excerpts_too_long_for_the_scheduler_are_warned_of():
    overrides = {"http.heartbeat_interval": 30, "report.excerpt": "64K"}
    warnings = load(None, {}, overrides).warnings
    assert len(warnings) == 2
    assert "offline after 30s" in warnings[0]


# The Go worker's variables


def test_the_go_workers_variables_take_its_place():
    environ = {
        "APP_HTTP_ADDR": ":9081",
        "SCHEDULER_URL": "http://127.0.0.1:8080/",
        "WORKER_ID": "worker-1",
        "APP_GRPC_ADDR": ":9091",
        "SCHEDULER_GRPC_ADDR": "LocalHost:9090",
        "INTERNAL_PROTOCOL": "grpc",
    }
    loaded = load(None, environ)
    assert loaded.config.http.listen == "127.0.0.1:9081"
    assert loaded.config.http.scheduler == "http://127.0.0.1:8080"
    assert loaded.config.worker.id == "worker-1"
    assert loaded.config.grpc.listen == "127.0.0.1:9091"
    assert loaded.config.grpc.scheduler == "localhost:9090"
    assert loaded.config.worker.protocol == "grpc"
    for name, key in ALIASES.items():
        assert loaded.sources[key] == f"environment {name}"


def test_the_stockade_name_wins_over_an_alias_and_the_alias_over_the_file(write):
    path = write('[worker]\nid = "file"\n')
    assert load(path, {"WORKER_ID": "alias"}).config.worker.id == "alias"
    environ = {"WORKER_ID": "alias", "STOCKADE_WORKER_ID": "own"}
    assert load(path, environ).config.worker.id == "own"


def test_an_empty_alias_counts_as_absent(write):
    loaded = load(write('[worker]\nid = "file"\n'), dict.fromkeys(ALIASES, ""))
    assert loaded.config.worker.id == "file"
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"worker.protocol": "grpc"}, "set grpc.listen"),
        (
            {
                "worker.protocol": "grpc",
                "grpc.listen": ":9091",
                "http.scheduler": "http://127.0.0.1:1",
            },
            "no grpc.scheduler to register with",
        ),
        ({"http.listen": ""}, "both are empty"),
        ({"grpc.tls_cert": "/etc/passwd"}, "it needs grpc.tls_key"),
        ({"http.tls_key": "/etc/passwd"}, "it needs http.tls_cert"),
        ({"http.tls_client_ca": "/etc/passwd"}, "set http.tls_cert and http.tls_key"),
    ],
)
def test_links_that_could_not_work_are_refused_with_what_mends_them(overrides, said):
    overrides = {
        "grpc.scheduler": "127.0.0.1:1" if "grpc.tls_cert" in overrides else "",
        **overrides,
    }
    assert said in refusal(overrides=overrides)


def test_a_link_runs_if_it_listens_or_has_a_scheduler():
    assert list(load(None, {}).config.links) == ["http"]
    assert list(load(None, {}, {"grpc.scheduler": "127.0.0.1:9090"}).config.links) == [
        "http",
        "grpc",
    ]
    only = load(None, {}, {"http.listen": "", "grpc.listen": ":9091"})
    assert list(only.config.links) == ["grpc"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("scheduler:9090", SchedulerAddress("scheduler", 9090, tls=False)),
        ("[::1]:9090", SchedulerAddress("::1", 9090, tls=False)),
        ("https://scheduler:9090", SchedulerAddress("scheduler", 9090, tls=True)),
        ("http://scheduler:9090/", SchedulerAddress("scheduler", 9090, tls=False)),
        ("https://[::1]:9090/", SchedulerAddress("::1", 9090, tls=True)),
    ],
)
def test_a_grpc_scheduler_is_an_address_and_over_tls_with_https(text, address):
    read = load(None, {}, {"grpc.scheduler": text}).config.grpc.scheduler
    assert parse_scheduler(read) == address
    assert load(None, {}, {"grpc.scheduler": read}).config.grpc.scheduler == read


# Listening


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":8081", Address("127.0.0.1", 8081)),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::]:0", Address("::", 0)),
        ("[0:0::1]:5", Address("::1", 5)),
        ("worker.example:8081", Address("worker.example", 8081)),
    ],
)
def test_addresses_are_read_and_written_back(text, address):
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


def test_an_advertised_address_may_leave_the_port_out():
    assert parse_advertised("10.0.0.5") == Address("10.0.0.5", 0)
    assert parse_advertised("[fd00::5]") == Address("fd00::5", 0)
    assert parse_advertised("proxy.example:80") == Address("proxy.example", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "LocalHost"])
def test_loopback_is_known_in_all_its_forms(host):
    assert is_loopback(host)
    assert is_this_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "worker.example", "1270.0.0.1", ""])
def test_what_others_may_reach_is_not_loopback(host):
    assert not is_loopback(host)


def test_an_address_of_documentation_is_not_this_host():
    assert not is_this_host("192.0.2.1")
    assert is_this_host(socket.gethostname())


WIDE = ["0.0.0.0:8081", "[::]:8081", "192.0.2.1:8081", "worker.example:8081"]


@pytest.mark.parametrize("listen", WIDE)
def test_a_wider_bind_is_refused_without_token_or_networks(listen, tmp_path):
    message = refusal(overrides={"http.listen": listen})
    assert "http.token_file or http.allow_networks" in message
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    for way_out in ({"http.token_file": str(token)}, {"http.allow_networks": ["10.0.0.0/8"]}):
        loaded = load(None, {}, {"http.listen": listen, **way_out})
        assert loaded.config.http.listen == listen
        assert loaded.warnings == ()


def test_a_wide_bind_open_to_every_address_is_warned_of():
    overrides = {"http.listen": "0.0.0.0:1", "http.allow_networks": "0.0.0.0/0"}
    (warning,) = load(None, {}, overrides).warnings
    assert "whoever reaches 0.0.0.0:1 can run commands here" in warning


def test_a_loopback_listener_with_a_remote_scheduler_is_refused_naming_the_ways_out():
    message = refusal(environ={"SCHEDULER_URL": "http://192.0.2.1:8080"})
    assert all(way in message for way in ("http.listen", "allow_networks", "http.advertise"))


@pytest.mark.parametrize(
    "scheduler", ["http://127.0.0.1:8080", "http://[::1]:8080", f"http://{socket.gethostname()}:1"]
)
def test_a_loopback_listener_with_a_scheduler_on_this_host_is_fine(scheduler):
    assert load(None, {"SCHEDULER_URL": scheduler}).config.http.scheduler == scheduler.lower()


def test_a_loopback_listener_behind_a_proxy_that_is_advertised_is_fine():
    environ = {"SCHEDULER_URL": "http://192.0.2.1:8080"}
    load(None, environ, {"http.advertise": "192.0.2.7:80"})
    assert "could not call back" in refusal(None, environ, {"http.advertise": "127.0.0.1:80"})


def test_a_token_file_that_is_absent_empty_or_no_file_is_refused(tmp_path):
    assert "not a regular file" in refusal(overrides={"http.token_file": str(tmp_path)})
    token = tmp_path / "token"
    assert "No such file" in refusal(overrides={"http.token_file": str(token)})
    token.touch()
    assert "it is empty or not a regular file" in refusal(overrides={"http.token_file": str(token)})


def test_a_token_that_everyone_can_read_is_warned_of(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    (warning,) = load(None, {}, {"http.token_file": str(token)}).warnings
    assert "readable by everyone" in warning
    assert "secret" not in warning


# Places


@pytest.mark.parametrize(
    ("uid", "environ", "state", "runtime"),
    [
        (
            0,
            {"XDG_STATE_HOME": "/x", "XDG_RUNTIME_DIR": "/x", "HOME": "/x"},
            "/var/lib/stockade",
            "/run/stockade",
        ),
        (
            4242,
            {"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r", "HOME": "/h"},
            "/s/stockade",
            "/r/stockade",
        ),
        (
            4242,
            {"HOME": "/h", "XDG_STATE_HOME": "relative"},
            "/h/.local/state/stockade",
            "/tmp/stockade-4242",
        ),
    ],
    ids=["root", "user with xdg", "user without xdg"],
)
def test_places_of_root_are_fixed_and_a_users_follow_xdg_or_home(uid, environ, state, runtime):
    made = host_defaults(environ, uid=uid)
    assert made["worker.state_dir"]() == Path(state)
    assert made["worker.runtime_dir"]() == Path(runtime)


def test_a_user_without_home_must_name_a_state_directory():
    with pytest.raises(ConfigError, match=r"set worker\.state_dir"):
        host_defaults({}, uid=2**31)["worker.state_dir"]()


def test_the_default_file_is_used_only_when_present(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert default_file(environ, uid=4242) is None
    path = tmp_path / "stockade" / "stockade.toml"
    path.parent.mkdir()
    path.touch()
    assert default_file(environ, uid=4242) == path
    assert default_file({"HOME": "/nonexistent"}, uid=4242) is None
    assert default_file({}, uid=2**31) is None


def test_a_default_file_that_cannot_be_looked_at_is_an_error_and_not_the_defaults(tmp_path):
    (tmp_path / "stockade").symlink_to("stockade")
    with pytest.raises(ConfigError, match="cannot read configuration"):
        default_file({"XDG_CONFIG_HOME": str(tmp_path)}, uid=4242)


# Documentation


def documented_rows():
    section = None
    for line in (ROOT / "docs" / "configuration.md").read_text().splitlines():
        if heading := re.fullmatch(r"## \[(.+)\]", line):
            section = heading[1]
        elif line.startswith("## "):
            section = None
        elif section and (
            row := re.fullmatch(r"\| (\w+) \| (.*?) \| (STOCKADE_\w+) \| .*\|", line)
        ):
            yield f"{section}.{row[1]}", row[2], row[3]


def documented_default(key):
    if key.default is NO_DEFAULT:
        return f"as limits.{key.name}" if key.section == "limits.max" else None
    if key.default is None and key.name not in LIMIT_FIELDS:
        return '`""`'
    return f"`{key.kind.write(key.default)}`"


def test_the_reference_has_every_key_with_its_default_and_variable():
    rows = list(documented_rows())
    assert [dotted for dotted, _, _ in rows] == list(KEYS)
    for dotted, default, environment in rows:
        assert environment == KEYS[dotted].environment
        assert default
        assert documented_default(KEYS[dotted]) in (default, None)


def test_the_reference_has_every_alias():
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert all(name in text for name in ALIASES)


def test_the_default_file_lists_every_key_commented_out_with_its_default(write):
    text = (ROOT / "deploy" / "stockade.toml").read_text()
    loaded = load(ROOT / "deploy" / "stockade.toml", {})
    assert (loaded.config, loaded.sources) == (load(None, {}).config, load(None, {}).sources)
    uncommented = re.sub(r"(?m)^#(\w+ = )", r"\1", text)
    document = tomllib.loads(uncommented)
    for section in SECTIONS:
        table = document
        for part in section.split("."):
            table = table[part]
        names = [name for name in table if name != "max"]
        assert names == [key.name for key in KEYS.values() if key.section == section]
    made = {dotted: make() for dotted, make in host_defaults({}, uid=0).items()}
    values = {key: str(value) if isinstance(value, Path) else value for key, value in made.items()}
    assert load(write(uncommented), {}, values).config == load(None, {}, values).config


def test_hidden_values_are_hidden_by_their_kind_itself():
    kind = KEYS["task.shell.environment"].kind
    assert kind.write({"TOKEN": "geheim"}) == f'{{ "TOKEN" = "{HIDDEN}" }}'
