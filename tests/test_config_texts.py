"""The configuration for people: addresses, the texts made from it, and what is shown of it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from kvtier.config import Config, settings
from kvtier.config.docs import default_toml, effective_table, effective_toml, reference_markdown
from kvtier.config.kinds import parse_listen, size_text
from kvtier.config.load import load
from kvtier.errors import InvalidConfigValue

SETTINGS = settings()


def from_file(tmp_path: Path, text: str):
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    return load(file=file, environ={})


# -- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target", "url"),
    [
        ("unix:///run/k.sock", "unix:/run/k.sock", "unix:///run/k.sock"),
        ("grpc://127.0.0.1:7411", "127.0.0.1:7411", "grpc://127.0.0.1:7411"),
        ("grpc://127.8.8.8:0", "127.8.8.8:0", "grpc://127.8.8.8:0"),
        ("grpc://localhost:1", "localhost:1", "grpc://localhost:1"),
        ("grpc://[::1]:7411", "[::1]:7411", "grpc://[::1]:7411"),
    ],
)
def test_addresses_that_may_be_served(text, target, url):
    address = parse_listen(text)
    assert address.grpc_target == target
    assert address.url() == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/run/k.sock",
        "unix:/run/k.sock",
        "unix://run/k.sock",
        "unix:///run/",
        "unix:///" + "x" * 120,
        "unix-abstract:kvtier",
        "grpc://127.0.0.1",
        "grpc://127.0.0.1:x",
        "grpc://127.0.0.1:65536",
        "grpc://:7411",
        "http://127.0.0.1:1",
    ],
)
def test_addresses_that_make_no_sense(text):
    with pytest.raises(InvalidConfigValue, match=r"daemon\.listen"):
        load(environ={}, overrides=[f"daemon.listen={text}"])


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "example.org", "*", "128.0.0.1"])
def test_only_loopback_is_served(host):
    for name, value in (
        ("daemon.listen", f"grpc://{host}:7411"),
        ("daemon.metrics_listen", f"{host}:9464"),
    ):
        with pytest.raises(InvalidConfigValue, match="TLS and tokens are not there yet"):
            load(environ={}, overrides=[f"{name}={value}"])


def test_address_lists(tmp_path):
    both = ("unix:///run/k.sock", "grpc://127.0.0.1:1")
    effective = load(environ={"KVTIER_DAEMON__LISTEN": ", ".join(both)})
    assert effective.config.daemon.listen == both
    for text in ("[]", "'unix:///a'", "[1]", "['unix:///a', 'unix:///a']"):
        with pytest.raises(InvalidConfigValue, match=r"daemon\.listen"):
            from_file(tmp_path, f"[daemon]\nlisten = {text}\n")


def test_directories_are_absolute():
    for value in ("", "state", "./state", "~/state"):
        with pytest.raises(InvalidConfigValue, match="not an absolute path"):
            load(environ={}, overrides=[f"daemon.directory={value}"])


# -- for people -----------------------------------------------------------------------------------


def test_the_default_file_is_valid_and_changes_nothing(tmp_path):
    text = default_toml()
    effective = from_file(tmp_path, text)
    assert effective.config == Config()
    assert "default" not in effective.sources.values(), "every key stands in the file"
    for setting in SETTINGS.values():
        assert setting.meaning.split()[0] in text


def test_what_is_shown_is_what_is_set(tmp_path):
    effective = load(environ={}, overrides=["host.bytes=100000001", "limits.session_ttl_s=0.25"])
    shown = effective_toml(effective)
    assert "bytes = 100000001  # --set host.bytes\n" in shown
    assert "session_ttl_s = 0.25  # --set limits.session_ttl_s\n" in shown
    again = from_file(tmp_path, shown)
    assert again.config == effective.config
    for name, entry in effective_table(effective).items():
        section, key = name.split(".")
        assert tomllib.loads(f"x = {entry['value']}")["x"] == tomllib.loads(shown)[section][key]


def test_every_key_has_a_meaning_and_a_range():
    for setting in SETTINGS.values():
        assert setting.meaning.endswith("."), setting.name
        assert setting.kind.allowed
        assert setting.variable == f"KVTIER_{setting.name.upper().replace('.', '__')}"


def test_the_reference_page_is_up_to_date(repo):
    assert (repo / "docs" / "config.md").read_text() == reference_markdown(), "run `make docs`"


def test_size_text():
    assert [size_text(n) for n in (1, 1024, 1536, 1 << 20, 10**9, 3 << 30, 1 << 40)] == [
        "1", "1KiB", "1536", "1MiB", "1000000000", "3GiB", "1TiB",
    ]  # fmt: skip


def test_the_environment_is_read_in_one_place(repo):
    """os.environ, os.getenv and friends stand in the configuration and the default address."""
    found = []
    words = {"environ", "environb", "getenv", "putenv", "expandvars"}
    for path in (repo / "kvtier").rglob("*.py"):
        text = path.read_text()
        if "v1" in path.parts or not any(word in text for word in words):
            continue
        for node in ast.walk(ast.parse(text)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in words:
                found.append(f"{path.relative_to(repo)}:{node.lineno}")
    allowed = {
        "transfer/planes/address.py",
        "config/tree.py",
        "config/load.py",
        "testing/daemon_process.py",
    }
    names = {item.removeprefix("kvtier/").split(":")[0] for item in found}
    assert names <= allowed
