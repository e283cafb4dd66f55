"""`kvtier config`, and what every command says of a wrong configuration."""

from __future__ import annotations

import json

import pytest

from tests.cli.said import failed


def test_config_default_checks(kvtier, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text(kvtier("config", "default").stdout)
    result = kvtier("config", "check", str(file), env={"KVTIER_NONSENSE": "1"})
    assert (result.returncode, result.stdout) == (0, f"{file}: ok\n")


def test_config_show(kvtier, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text("[host]\nbytes = '2GiB'\n")
    words = ("config", "show", "--config", str(file), "--set", "host.verify=off", "--json")
    result = kvtier(*words, env={"KVTIER_DAEMON__LOG_LEVEL": "debug"})
    shown = json.loads(result.stdout)
    assert shown["host.bytes"] == {"value": '"2GiB"', "source": f"file {file}"}
    assert shown["host.verify"] == {"value": '"off"', "source": "--set host.verify"}
    assert shown["daemon.log_level"]["source"] == "environment KVTIER_DAEMON__LOG_LEVEL"


@pytest.mark.parametrize("command", ["serve", "status", "doctor"])
def test_a_wrong_key_stops_every_command(kvtier, command):
    assert "nearest known one is host.bytes" in failed(kvtier(command, "--set", "host.byte=1"), 2)
    said = failed(kvtier(command, env={"KVTIER_HOST_BYTES": "1"}), 2)
    assert "KVTIER_HOST__BYTES" in said


def test_config_check_names_the_mistake(kvtier, tmp_path):
    file = tmp_path / "kvtier.toml"
    file.write_text("[host]\nbytes = 'banana'\n")
    assert "host.bytes = 'banana'" in failed(kvtier("config", "check", str(file)), 2)
    assert "No such file" in failed(kvtier("config", "check", str(tmp_path / "no")), 2)


def test_config_check_names_every_mistake(kvtier, tmp_path):
    file = tmp_path / "many.toml"
    file.write_text(
        '[host]\nbytes = 5\nbytez = "x"\n[nvme]\npaths = "/a"\n[wat]\na = 1\nb = 2\n[empty]\n'
        "[limits]\nlease_ms_max = 5000\n"
    )
    result = kvtier("config", "check", str(file))
    assert (result.returncode, result.stdout) == (2, "")
    lines = result.stderr.splitlines()
    starts = (
        "host.bytes = 5 ", "unknown key host.bytez ", "nvme.paths = ", "unknown key wat.a ",
        "unknown key wat.b ", "unknown section [empty] ",
    )  # fmt: skip
    assert len(lines) == 2 * len(starts)
    for line, start in zip(lines[::2], starts, strict=True):
        assert line.startswith(f"error: {start}")
    assert all(line.startswith("remedy: ") for line in lines[1::2])


@pytest.mark.parametrize("override", ["=5", "", " = 5"])
def test_a_setting_without_a_key(kvtier, override):
    said = failed(kvtier("config", "show", "--set", override), 2)
    assert said == f"error: --set {override!r} names no key"


def test_a_configuration_that_never_ends(kvtier, tmp_path):
    assert "more than" in failed(kvtier("config", "check", "/dev/zero"), 2)
