"""The configuration: every key from every source. Nothing is clamped, nothing ignored."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from kvtier.config import Config, LogFormat, Verify, settings
from kvtier.config.kinds import Choice, Seconds, Size, Whole
from kvtier.config.load import load
from kvtier.errors import InvalidConfigValue, UnknownConfigKey

SETTINGS = settings()
NAMES = list(SETTINGS)
NUMBERS = [name for name, s in SETTINGS.items() if isinstance(s.kind, Whole | Seconds | Size)]


def from_file(tmp_path: Path, text: str, **more):
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    return load(file=file, environ=more.get("environ", {}), overrides=more.get("overrides", ()))


def toml_line(name: str, value: str) -> str:
    section, key = name.split(".")
    return f"[{section}]\n{key} = {value}\n"


# -- sources --------------------------------------------------------------------------------------


def test_nothing_set_gives_the_defaults():
    effective = load(environ={})
    assert effective.config == Config()
    assert set(effective.sources) == set(NAMES)
    assert set(effective.sources.values()) == {"default"}


def test_later_sources_win_and_are_named(tmp_path):
    text = "[host]\nbytes = '128MiB'\nverify = 'off'\nsample_one_in = 5\n"
    environ = {"KVTIER_HOST__BYTES": "256 MiB", "KVTIER_HOST__VERIFY": "sampled", "PATH": "/bin"}
    effective = from_file(tmp_path, text, environ=environ, overrides=["host.bytes=1GB"])
    assert effective.config.host.bytes == 10**9
    assert effective.config.host.verify is Verify.SAMPLED
    assert effective.config.host.sample_one_in == 5
    assert effective.sources["host.bytes"] == "--set host.bytes"
    assert effective.sources["host.verify"] == "environment KVTIER_HOST__VERIFY"
    assert effective.sources["host.sample_one_in"] == f"file {tmp_path / 'kvtier.toml'}"
    assert effective.sources["daemon.log_level"] == "default"


def test_the_environment_can_name_the_file(tmp_path):
    file = tmp_path / "other.toml"
    file.write_text("[daemon]\nlog_format = 'json'\n")
    effective = load(environ={"KVTIER_CONFIG": str(file)})
    assert effective.config.daemon.log_format is LogFormat.JSON


def test_a_named_file_wins_over_the_environments(tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("this is not toml")
    effective = from_file(
        tmp_path, "[host]\nbytes = 67108864\n", environ={"KVTIER_CONFIG": str(other)}
    )
    assert effective.config.host.bytes == 64 << 20


@pytest.mark.parametrize("name", NAMES)
def test_every_key_can_be_set_everywhere(tmp_path, name):
    """Each default, written as text, comes back as the same value from all three sources."""
    setting = SETTINGS[name]
    literal = setting.kind.to_toml(setting.default)
    text = literal
    if literal.startswith("["):
        text = ",".join(json.loads(literal))
    elif literal.startswith('"'):
        text = json.loads(literal)
    for effective, source in (
        (from_file(tmp_path, toml_line(name, literal)), f"file {tmp_path / 'kvtier.toml'}"),
        (load(environ={setting.variable: text}), f"environment {setting.variable}"),
        (load(environ={}, overrides=[f"{name}={text}"]), f"--set {name}"),
    ):
        assert effective.value(name) == setting.default
        assert type(effective.value(name)) is type(setting.default)
        assert effective.sources[name] == source


def test_the_tree_is_frozen():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host.bytes = 1  # type: ignore[misc]


# -- unknown keys ---------------------------------------------------------------------------------


def misspelt(name: str) -> list[str]:
    """The key with one letter left out, one changed, one doubled."""
    middle = len(name.split(".")[0]) + 1 + len(name.split(".")[1]) // 2
    return [
        name[:middle] + name[middle + 1 :],
        name[:middle] + "9" + name[middle + 1 :],
        name[:middle] + name[middle] + name[middle:],
    ]


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_letter_names_the_right_key(tmp_path, name):
    for wrong in misspelt(name):
        if wrong in SETTINGS:
            continue
        variable = "KVTIER_" + wrong.replace(".", "__").upper()
        attempts = {
            f"unknown key {wrong} (file {tmp_path / 'kvtier.toml'})": lambda w=wrong: from_file(
                tmp_path, toml_line(w, "1")
            ),
            f"unknown key {variable} (environment)": lambda v=variable: load(environ={v: "1"}),
            f"unknown key {wrong} (--set)": lambda w=wrong: load(environ={}, overrides=[f"{w}=1"]),
        }
        for message, attempt in attempts.items():
            with pytest.raises(UnknownConfigKey) as caught:
                attempt()
            assert message in str(caught.value)
            near = SETTINGS[name].variable if "environment" in message else name
            assert f"the nearest known one is {near}" in str(caught.value)
            assert near in caught.value.remedy


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("KVTIER_HOST_BYTES", "KVTIER_HOST__BYTES"),
        ("kvtier_host__bytes", "KVTIER_HOST__BYTES"),
        ("KVTIER_CONFIGS", "KVTIER_CONFIG"),
        ("KVTIER_", "KVTIER_CONFIG"),
    ],
)
def test_a_variable_that_only_looks_right_is_refused(variable, near):
    with pytest.raises(UnknownConfigKey) as caught:
        load(environ={variable: "1"})
    assert variable in str(caught.value)
    assert f"is {near}" in str(caught.value)


def test_service_links_of_kubernetes_are_no_settings():
    links = {
        "KVTIER_SERVICE_HOST": "10.0.0.1",
        "KVTIER_SERVICE_PORT": "7411",
        "KVTIER_SERVICE_PORT_GRPC": "7411",
        "KVTIER_PORT": "tcp://10.0.0.1:7411",
        "KVTIER_PORT_7411_TCP": "tcp://10.0.0.1:7411",
        "KVTIER_PORT_7411_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=links).config == Config()
    # Without the link that Kubernetes always sets, the same name is somebody's mistake.
    with pytest.raises(UnknownConfigKey, match="KVTIER_SERVICE_PORT"):
        load(environ={"KVTIER_SERVICE_PORT": "7411"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bytes = 1\n", "unknown key bytes .* is host.bytes"),
        ("[hots]\nbytes = 1\n", "unknown key hots.bytes .* is host.bytes"),
        ("[hots]\n", r"unknown section \[hots\] .* is \[host\]"),
        ("[host.daemon]\nlisten = []\n", "unknown key host.daemon"),
    ],
)
def test_wrong_sections_are_refused(tmp_path, text, message):
    with pytest.raises(UnknownConfigKey, match=message):
        from_file(tmp_path, text)


# -- wrong values ---------------------------------------------------------------------------------


def refused(caught, name: str, source: str) -> None:
    """The error names key, source and allowed range; the remedy repeats what is allowed."""
    text = str(caught.value)
    assert text.startswith(f"{name} = "), text
    assert f"({source})" in text
    assert f"allowed: {SETTINGS[name].kind.allowed}" in text
    assert SETTINGS[name].kind.allowed in caught.value.remedy


@pytest.mark.parametrize("name", NUMBERS)
def test_text_that_is_no_number_in_range(name):
    setting = SETTINGS[name]
    for value in ("banana", "-1", "1e99", "", "nan", "0x10", "1_0", "\uff11"):
        with pytest.raises(InvalidConfigValue) as caught:
            load(environ={setting.variable: value})
        refused(caught, name, f"environment {setting.variable}")
        with pytest.raises(InvalidConfigValue) as caught:
            load(environ={}, overrides=[f"{name}={value}"])
        refused(caught, name, f"--set {name}")


@pytest.mark.parametrize("name", NUMBERS)
def test_toml_of_the_wrong_type_or_range(tmp_path, name):
    no_numbers = ("'banana'", "true", "[]", "[1]", "1979-05-27", "''")
    for value in (*no_numbers, "-1", "1e99", "nan", "inf"):
        with pytest.raises(InvalidConfigValue) as caught:
            from_file(tmp_path, toml_line(name, value))
        refused(caught, name, f"file {tmp_path / 'kvtier.toml'}")


@pytest.mark.parametrize("name", NUMBERS)
def test_just_outside_the_range(tmp_path, name):
    kind = SETTINGS[name].kind
    for value in (kind.low - 1, kind.high + 1, 0 if kind.low > 0 else -1, 10**30):
        with pytest.raises(InvalidConfigValue) as caught:
            from_file(tmp_path, toml_line(name, str(value)))
        assert "out of range" in str(caught.value)
        refused(caught, name, f"file {tmp_path / 'kvtier.toml'}")


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(SETTINGS[n].kind, Choice)])
def test_no_member_of_the_choice(tmp_path, name):
    for value in ("'banana'", "1", "true", "'ALWAYS '", "[]"):
        with pytest.raises(InvalidConfigValue) as caught:
            from_file(tmp_path, toml_line(name, value))
        refused(caught, name, f"file {tmp_path / 'kvtier.toml'}")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("67108864", 64 << 20),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("10 GB", 10 * 10**9),
        ("10GiB", 10 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5tib", 1 << 39),
        ("67108864b", 64 << 20),
    ],
)
def test_sizes_as_people_write_them(tmp_path, text, value):
    assert load(environ={"KVTIER_HOST__BYTES": text}).config.host.bytes == value
    assert from_file(tmp_path, f"[host]\nbytes = '{text}'\n").config.host.bytes == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10 G", "'G' is no unit"),
        ("10GB/s", "not a size"),
        ("GiB", "not a size"),
        ("64.0000001MiB", "not a whole number of bytes"),
        ("-64MiB", "out of range"),
        ("1" * 5000, "out of range"),
        ("1" * 5000 + "GiB", "out of range"),
    ],
)
def test_sizes_that_are_none(text, reason):
    with pytest.raises(InvalidConfigValue, match=reason):
        load(environ={"KVTIER_HOST__BYTES": text})


@pytest.mark.parametrize("name", ["limits.keys_per_call_max", "limits.put_idle_ms"])
def test_a_count_takes_no_unit(name):
    with pytest.raises(InvalidConfigValue, match="not a whole number"):
        load(environ={}, overrides=[f"{name}=10 GB"])


def test_duplicates_in_a_file_name_the_line(tmp_path):
    with pytest.raises(InvalidConfigValue, match=r"duplicate key in line 3: bytes = 6"):
        from_file(tmp_path, "[host]\nbytes = 67108864\nbytes = 67108865\n")
    with pytest.raises(InvalidConfigValue, match=r"duplicate key in line 3: \[host\]"):
        from_file(tmp_path, "[host]\nbytes = 67108864\n[host]\n")


def test_duplicates_on_the_command_line():
    with pytest.raises(InvalidConfigValue, match=r"host.bytes = 2GiB \(--set\): given twice"):
        load(environ={}, overrides=["host.bytes=1GiB", "host.bytes=2GiB"])


def test_an_override_without_a_value():
    with pytest.raises(InvalidConfigValue, match=r"host.bytes =  \(--set\): no value"):
        load(environ={}, overrides=["host.bytes"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host = 3\n", "host is a section, not a value"),
        ("host = [1]\n", "host is a section, not a value"),
        ("[[host]]\nbytes = 1\n", "host is a section, not a value"),
        ("[host.bytes]\nvalue = 1\n", "host.bytes = .* a table where a value belongs"),
        ("[host]\nbytes = {}\n", "host.bytes = .* a table where a value belongs"),
        ("[host\n", "line 1"),
        ("[host]\nbytes 3\n", "line 2.*bytes 3"),
    ],
)
def test_wrong_nesting_and_broken_files(tmp_path, text, message):
    with pytest.raises(InvalidConfigValue, match=message) as caught:
        from_file(tmp_path, text)
    assert str(tmp_path / "kvtier.toml") in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidConfigValue, match="No such file"):
        load(file=tmp_path / "none", environ={})
    with pytest.raises(InvalidConfigValue, match="Is a directory"):
        load(file=tmp_path, environ={})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InvalidConfigValue, match="nobody"):
        patch.setattr("kvtier.config.load._FILE_SILENCE_S", 0.05)
        load(file=pipe, environ={})
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    with pytest.raises(InvalidConfigValue, match="not UTF-8"):
        load(file=latin, environ={})


@pytest.mark.parametrize(
    ("overrides", "blamed", "other"),
    [
        (["limits.lease_ms_max=5000"], "limits.lease_ms_default", "limits.lease_ms_max"),
        (
            ["limits.bytes_per_call_max=9GiB"],
            "limits.bytes_per_call_max",
            "limits.bytes_under_way_max",
        ),
        (["limits.chunk_bytes=16MiB"], "limits.chunk_bytes", "limits.message_bytes_max"),
    ],
)
def test_values_that_do_not_go_together(overrides, blamed, other):
    with pytest.raises(InvalidConfigValue) as caught:
        load(environ={}, overrides=overrides)
    assert str(caught.value).startswith(f"{blamed} = ")
    assert f"{other}, which is " in str(caught.value)


def test_the_variables_of_the_benchmarks_are_no_settings():
    environ = {"KVTIER_TRACES": "/somewhere", "KVTIER_SIM_SEEDS": "5"}
    assert load(environ=environ).config == Config()
