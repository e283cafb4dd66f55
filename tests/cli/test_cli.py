"""The command line: what it prints, where errors go, and with which code it ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest

import kvtier.cli
from kvtier._version import __version__
from kvtier.client import connect
from kvtier.errors import UnknownConfigKey
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from tests.cli.said import failed

COMMANDS = (
    "serve", "status", "put", "get", "verify", "quarantine", "doctor", "config", "metrics", "bench",
)  # fmt: skip


# -- help and errors ------------------------------------------------------------------------------


def test_help_lists_the_commands(kvtier):
    result = kvtier("--help")
    assert result.returncode == 0
    assert "Exit codes: 0 done;" in result.stdout
    for name in COMMANDS:
        assert f"    {name}" in [line[: 4 + len(name)] for line in result.stdout.splitlines()]
        assert kvtier(name, "--help").returncode == 0, name


def test_version(kvtier):
    assert kvtier("--version").stdout == f"kvtier {__version__}\n"


def test_no_command_and_a_wrong_one(kvtier):
    assert kvtier().returncode == 2
    assert "invalid choice: 'stauts'" in kvtier("stauts").stderr


def test_help_loads_no_daemon_and_no_grpc():
    code = (
        "import sys, kvtier.cli\n"
        "kvtier.cli.main(['config', 'show'])\n"
        "heavy = {'grpc', 'google.protobuf', 'torch', 'numpy', 'kvtier.daemon'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'loaded: {found}' if found else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_ctrl_c_is_clean(monkeypatch):
    def interrupted(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.cli.config_command._show", interrupted)
    assert kvtier.cli.main(["config", "show"]) == 130


def test_a_reader_that_goes_away_is_clean():
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "kvtier", "config", "default"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_foreign_commands(monkeypatch, capsys):
    def register(commands) -> None:
        parser = commands.add_parser("greet")
        parser.set_defaults(run=lambda arguments: 7)

    class Loaded:
        name = "greet"

        def load(self):
            return register

    broken = EntryPoint("broken", "no_such_package_at_all:register", "kvtier.commands")
    monkeypatch.setattr("kvtier.cli.foreign.entry_points", lambda group: [Loaded(), broken])
    assert kvtier.cli.main(["greet"]) == 7
    with pytest.raises(SystemExit) as caught:
        kvtier.cli.main(["broken"])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "kvtier broken cannot be loaded" in said
    assert "remedy: " in said
    assert kvtier.cli.main(["config", "default"]) == 0, "others are not held up"


def test_errors_in_process(capsys, monkeypatch):
    monkeypatch.setenv("KVTIER_HOST__BYTE", "1")
    assert kvtier.cli.main(["config", "show"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: unknown key KVTIER_HOST__BYTE (environment)")
    assert UnknownConfigKey.__name__ not in said


# -- status, put, get -----------------------------------------------------------------------------


def test_status_of_a_daemon(kvtier, daemon):
    text = kvtier("status", "--url", daemon.url).stdout
    assert text.startswith(f"kvtier {__version__}: ready, up ")
    assert str(daemon.directory) in text
    assert "\nhost  16MiB     100 %  0 %" in text
    found = json.loads(kvtier("status", "--url", daemon.url, "--json").stdout)
    assert found["state"] == "ready"
    assert found["tiers"][0]["capacity_bytes"] == 16 << 20
    assert all(isinstance(value, int) for tier in found["tiers"] for value in tier.values())


def test_the_url_comes_from_the_configuration(kvtier, daemon):
    env = {"KVTIER_DAEMON__LISTEN": daemon.url}
    assert kvtier("status", env=env).returncode == 0


def test_nobody_there(kvtier, tmp_path):
    began = time.monotonic()
    failed(kvtier("status", "--url", f"unix://{tmp_path}/none"), 1)
    assert time.monotonic() - began < 10
    assert "scheme" in failed(kvtier("status", "--url", "http://127.0.0.1:1"), 2)


@pytest.mark.parametrize("length", [0, 968, 969, 5_000_000])
def test_a_file_through_the_cache(kvtier, daemon, tmp_path, length):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(length))
    place = ("--url", daemon.url, "--key-of", "the file", "--page-bytes", "64KiB")
    if length < 2_000:
        place = (*place[:-1], "1KiB")
    put = kvtier("put", *place, str(source))
    assert put.returncode == 0, put.stderr
    assert put.stderr.startswith("stored ")
    if length < 2_000:  # what the store counts is copies
        counted = kvtier("status", "--url", daemon.url).stdout
        assert "\ncopies_stored " in counted
        assert "\nstored " not in counted
    assert kvtier("put", *place, str(source)).stderr.startswith("exists ")
    got = kvtier("get", *place, "-o", str(target))
    assert (got.returncode, got.stdout) == (0, "")
    assert got.stderr.startswith("host ")
    assert target.read_bytes() == source.read_bytes()
    other = kvtier("get", *place, "--tenant", "somebody", "-o", str(tmp_path / "none"))
    assert other.returncode == 1
    assert other.stderr.startswith("miss: ")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["in", "out"]


def file_keys(content: bytes, name: str, pages: int) -> list[bytes]:
    """The keys as `kvtier put --help` gives them."""
    digest = hashlib.sha256(content).digest()
    tail = [hashlib.sha256(digest + i.to_bytes(8, "little")).digest() for i in range(1, pages)]
    return [hashlib.sha256(name.encode()).digest(), *tail]


def open_pages(connection, kilobytes: int = 1):
    segment = Segment(
        name="bytes", role=Role.OPAQUE, dtype="uint8", layers=1, heads=kilobytes, dim=1024,
        scale_rule=ScaleRule.NONE,
    )  # fmt: skip
    layout = Layout.from_segments(
        [segment], model_id="kvtier-file", revision="2", page_tokens=1, kv_compute="uint8",
        key_scheme="kvtier-file-2",
    )  # fmt: skip
    return connection.namespace(layout, tenant="default")


@pytest.mark.parametrize("lost", ["nothing", "the tail"])
def test_another_file_under_the_same_key_is_never_mixed_with_the_old_one(
    kvtier, daemon, tmp_path, lost
):
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    old.write_bytes(b"1" * 3000)
    new.write_bytes(b"2" * 3000)
    place = ("--url", daemon.url, "--key-of", "x", "--page-bytes", "1KiB")
    assert kvtier("put", *place, str(old)).returncode == 0
    keys = file_keys(old.read_bytes(), "x", 3)
    gone = {"nothing": [], "the tail": keys[1:], "the head": keys[:1], "all": keys}[lost]
    with connect(daemon.url, deadline=5) as connection:
        deleted = open_pages(connection).delete(gone)
        assert [code.name for code in deleted.reasons] == ["DELETED"] * len(gone)
    put = kvtier("put", *place, str(new))
    assert put.returncode == 0, put.stderr
    assert ("replaced" in put.stderr) == (lost in ("nothing", "the tail"))
    assert kvtier("get", *place, "-o", str(out)).returncode == 0
    assert out.read_bytes() == new.read_bytes()
    assert kvtier("put", *place, str(new)).stderr == "exists             3 pages\n"
    assert "replaced" in kvtier("put", *place, str(old)).stderr
    assert kvtier("get", *place, "-o", str(out)).returncode == 0
    assert out.read_bytes() == old.read_bytes()


def test_get_gives_back_the_file_that_was_put_or_nothing(kvtier, daemon, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"1" * 3000)
    place = ("--url", daemon.url, "--key-of", "x", "--page-bytes", "1KiB")
    keys = file_keys(source.read_bytes(), "x", 3)

    def misses(why: str) -> None:
        got = kvtier("get", *place, "-o", str(out))
        assert (got.returncode, got.stdout) == (1, "")
        assert got.stderr == f"miss: {why} {keys[0].hex()}\n"
        assert not out.exists()

    misses("nothing is stored under")
    assert kvtier("put", *place, str(source)).returncode == 0
    with connect(daemon.url, deadline=5) as connection:
        pages = open_pages(connection)
        pages.delete(keys[2:])
        misses("pages are gone of the file under")
        pages.put(keys[2:], [b"3" * 1024])
        misses("the pages are not those of the file that was put under")
        pages.delete(keys[:1])
        pages.put(keys[:1], [b"3" * 1024])
        misses("what was not made by `kvtier put` is stored under")


def test_files_with_the_same_content_share_their_pages(kvtier, daemon, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(os.urandom(3000))
    place = ("--url", daemon.url, "--page-bytes", "1KiB")
    assert (
        kvtier("put", *place, "--key-of", "x", str(source)).stderr == "stored             3 pages\n"
    )
    put = kvtier("put", *place, "--key-of", "y", str(source))
    assert put.stderr == "stored             1 pages\nexists             2 pages\n"


def test_a_file_larger_than_the_cache_is_a_miss(kvtier, daemon, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(bytes(20 << 20))  # of a tier of 16 MiB
    place = ("--url", daemon.url, "--key-of", "large")
    put = kvtier("put", *place, str(source))
    assert put.returncode == 1
    assert "pages had to give way again" in put.stderr
    got = kvtier("get", *place, "-o", str(out))
    assert got.returncode == 1
    assert got.stderr.startswith("miss: ")
    assert not out.exists()


def test_get_to_standard_output_by_hexadecimal_key(kvtier, daemon, tmp_path):
    source = tmp_path / "in"
    source.write_text("hello\n")
    place = ("--url", daemon.url, "--key", "ab" * 32)
    assert kvtier("put", *place, str(source)).returncode == 0
    assert kvtier("get", *place).stdout == "hello\n"


def test_wrong_arguments_of_put(kvtier, tmp_path):
    file = str(tmp_path / "none")
    assert "64 hexadecimal digits" in kvtier("put", "--key", "xyz", file).stderr
    assert "no unit of size" in kvtier("put", "--key-of", "x", "--page-bytes", "1X", file).stderr
    assert (
        "multiple of 1 KiB" in kvtier("put", "--key-of", "x", "--page-bytes", "1025", file).stderr
    )
    assert file in failed(kvtier("put", "--key-of", "x", file), 2)


# -- doctor, serve --------------------------------------------------------------------------------


def test_doctor(kvtier, daemon, tmp_path):
    words = ("--url", daemon.url, "--set", "host.bytes=64MiB")
    words = (*words, "--set", f"daemon.directory={tmp_path / 'state'}")
    result = kvtier("doctor", *words, "--json")
    findings = {item["check"]: item for item in json.loads(result.stdout)}
    assert result.returncode == 0, result.stdout
    expected = {"python", "torch", "numba", "prometheus_client", "memfd", "populate", "hugepages",
                "memory", "slabs", "/dev/shm", "open files", "directory", "daemon", "clock",
                "nvme"}  # fmt: skip
    assert set(findings) == expected
    for item in findings.values():
        assert item["grade"] in ("ok", "warn", "fail")
        assert item["found"]
        assert bool(item["remedy"]) == (item["grade"] != "ok"), item
    assert findings["daemon"]["grade"] == "ok"
    assert findings["slabs"]["found"].startswith("host.bytes makes 1 slabs: ")
    assert findings["slabs"]["grade"] == "warn"
    assert "kvtier" in kvtier("doctor", *words).stdout


def test_doctor_finds_what_is_wrong(kvtier, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o755)
    result = kvtier(
        "doctor", "--json", "--url", f"unix://{tmp_path}/none", "--set", "host.bytes=60TiB",
        "--set", f"daemon.directory={state}",
    )  # fmt: skip
    findings = {item["check"]: item for item in json.loads(result.stdout)}
    assert result.returncode == 1
    assert findings["memory"]["grade"] == "fail"
    assert findings["directory"]["remedy"] == "name a daemon.directory of its own"
    assert findings["daemon"]["grade"] == "warn"
    assert state.exists()
    assert not list(state.iterdir()), "doctor changes nothing"


def test_ctrl_c_drains_serve(daemon):
    daemon.signal(signal.SIGINT)
    assert daemon.wait() == 0


def test_doctor_looks_at_every_nvme_path(kvtier, tmp_path):
    path = tmp_path / "device"
    words = ("doctor", "--json", "--url", f"unix://{tmp_path}/none")
    words += ("--set", f"nvme.paths={path},/proc/none", "--set", "nvme.bytes=8MiB")
    result = kvtier(*words)
    found = [item for item in json.loads(result.stdout) if item["check"] == "nvme"]
    assert [item["grade"] for item in found] in (["ok", "warn"], ["ok", "fail"])
    assert str(path) in found[0]["found"]
    assert not path.exists(), "doctor changes nothing"


def test_get_writes_through_what_is_no_file(kvtier, daemon, tmp_path):
    """A link keeps being one and what it leads to is replaced; a pipe is written to, and stays."""
    source, real, link = (tmp_path / name for name in ("in", "real", "link"))
    source.write_bytes(os.urandom(30_000))
    place = ("--url", daemon.url, "--key-of", "the file", "--page-bytes", "64KiB")
    assert kvtier("put", *place, str(source)).returncode == 0
    real.write_bytes(b"old")
    link.symlink_to(real)
    assert kvtier("get", *place, "-o", str(link)).returncode == 0
    assert link.is_symlink()
    assert real.read_bytes() == source.read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_bytes()))
    reader.start()
    assert kvtier("get", *place, "-o", str(pipe)).returncode == 0
    reader.join(10)
    assert came == [source.read_bytes()]
    assert pipe.is_fifo()
    said = kvtier("get", *place, "-o", "")
    assert said.returncode == 2
    assert "error: .: Is a directory" in said.stderr
    assert sorted(item.name for item in tmp_path.iterdir()) == ["in", "link", "pipe", "real"]


@pytest.mark.parametrize("fd", ["77", "-1", "99999999999999999999"])
def test_serve_refuses_a_descriptor_that_is_not_open(kvtier, tmp_path, fd):
    place = f"daemon.directory={tmp_path / 'state'}"
    said = failed(kvtier("serve", "--set", place, "--ready-fd", fd), 2)
    assert fd in said
