"""What the commands do with pipes, devices, closed streams, and a daemon that does not answer."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading

import pytest

import kvtier.cli
from kvtier.cli import file_pages, file_source
from tests.bench.traces import conversations, mooncake_rows, write_lines

PLACE = ("--key-of", "x", "--page-bytes", "64KiB")


def shell(command: str, *, unbuffered: bool) -> subprocess.CompletedProcess[str]:
    """Runs `command`, in which $KV is the command line."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    environment["KV"] = f"{sys.executable} -m kvtier"
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_pipes_without_another_end(main, fake, fifo, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(bytes(3000))
    assert main("put", *PLACE, source)[0] == 0
    code, out, err = main("put", *PLACE, "--timeout", "0.5", fifo)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {fifo}: nobody writes to this pipe within 0.5 s\nremedy: ")
    code, out, err = main("get", *PLACE, "--timeout", "0.5", "-o", fifo)
    assert (code, out) == (2, "")
    assert f"error: {fifo}: nobody reads this pipe within 0.5 s\nremedy: " in err


def test_streams_have_a_limit_and_files_have_none(main, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(file_source, "STREAM_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(file_pages, "_RUN_BYTES", 256 << 10)
    asked: list[int] = []
    read = file_source._pread
    monkeypatch.setattr(
        file_source, "_pread", lambda fd, at, count: asked.append(count) or read(fd, at, count)
    )
    code, _, err = main("put", *PLACE, "/dev/zero")
    assert (code, "error: /dev/zero: more than 1048576 bytes" in err) == (2, True)
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(3_000_000))
    assert main("put", *PLACE, source)[0] == 0
    assert max(asked) <= 256 << 10
    assert main("get", *PLACE, "-o", out)[0] == 0
    assert out.read_bytes() == source.read_bytes()
    code, out_text, err = main("get", *PLACE)
    assert (code, out_text) == (2, "")
    assert "the file is 3000000 bytes long" in err


def test_standard_output_that_takes_nothing(main, fake, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(os.urandom(3_000_000))
    assert main("put", *PLACE, source)[0] == 0
    said = shell(f"$KV status --url {fake.url} >&-", unbuffered=False)
    assert said.returncode == 2
    assert said.stderr.startswith("error: standard output: Bad file descriptor\nremedy: ")
    assert len(said.stderr.splitlines()) == 2
    said = shell("$KV config --help >/dev/full", unbuffered=False)
    assert said.returncode == 2
    assert said.stderr.startswith("error: standard output: No space left on device\nremedy: ")
    # Unbuffered, a write that the reader's end cuts short is none that Python reports.
    get = f"$KV get --url {fake.url} --key-of x --page-bytes 64KiB"
    said = shell(f"{{ {get}; echo $? >&2; }} | head -c 10 >/dev/null", unbuffered=True)
    assert said.stderr.splitlines()[-1] == "141"
    assert "Traceback" not in said.stderr


def test_nobody_there_is_named_by_every_command(capfd, tmp_path):
    url = f"unix://{tmp_path}/none"
    trace = write_lines(tmp_path / "t.jsonl", mooncake_rows(conversations(1, requests=4)))
    for words in (
        ["status"], ["verify"], ["quarantine", "list"], ["get", *PLACE],
        ["put", *PLACE, str(trace)], ["bench", "hit-ratio", str(trace), "--live"],
    ):  # fmt: skip
        address = [url] if words[-1] == "--live" else ["--url", url]
        assert kvtier.cli.main([*words, *address]) == 1
        first, second = capfd.readouterr().err.splitlines()[-2:]
        assert first.startswith(f"error: no answer from the daemon at {url} ("), words
        assert "see that " in second


def test_an_error_of_a_daemon_that_is_silent_or_ends_names_it(main, fake):
    fake.stall |= {"list_quarantine", "status", "verify", "get"}
    words = (("quarantine list",), ("status",), ("get", *PLACE))
    for command in words:
        code, _, err = main(*command, "--timeout", "0.2")
        assert code == 1
        assert err.startswith(f"error: the daemon at {fake.url} did not answer within 0.2 s (")
        assert "--timeout" in err.splitlines()[1]
    said: list[tuple[int, str, str]] = []
    thread = threading.Thread(target=lambda: said.append(main("verify", "--tier", "host")))
    thread.start()
    while not fake.calls["verify"]:
        assert thread.is_alive()
    fake.stop()
    thread.join()
    ((code, _, err),) = said
    assert code == 1
    # The daemon, in this process too, may have logged something before.
    assert err.splitlines()[-2].startswith(f"error: no answer from the daemon at {fake.url} (")


@pytest.mark.parametrize(
    ("file", "why", "remedy"),
    [
        ("none", "No such file or directory", "is not there"),
        (".", "Is a directory", "not a directory"),
        ("in/x", "Not a directory", "a part of it is a file"),
        ("x" * 300, "File name too long", "shorter path"),
        ("loop", "Too many levels of symbolic links", "in a circle"),
    ],
)
def test_each_error_of_a_file_has_its_remedy(main, tmp_path, file, why, remedy):
    (tmp_path / "in").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / file
    code, _, err = main("put", *PLACE, path)
    assert code == 2
    first, second = err.splitlines()
    assert why in first
    assert remedy in second


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_export_goes_to_regular_files_alone(main, fake, fifo, force):
    for target in ("/dev/full", fifo):
        code, _, err = main("quarantine export", *force, "host:7:100", target)
        assert (code, err.splitlines()[0]) == (2, f"error: {target} is not a regular file")


def options_with_a_type(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from ((f"{name} {words}", item) for words, item in options_with_a_type(child))
        elif action.type is not None:
            yield "/".join(action.option_strings) or action.dest, action


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ([], {"put --timeout", "engine --port", "chat --temperature", "demo --tokens"}),
        (["bench", "fidelity"], {"bench fidelity --windows", "bench hit-ratio --rate"}),
    ],
    ids=["all", "fidelity"],
)
def test_a_wrong_number_names_no_function(words, some):
    """argparse shows the name of a function that raises ValueError: 'invalid _seconds value'."""
    found = dict(options_with_a_type(kvtier.cli._parser(words)))
    assert some <= set(found)
    for name, action in found.items():
        for text in ("-1", "0", "nan", "1e99", "x", ""):
            try:
                action.type(text)
            except argparse.ArgumentTypeError:
                continue
            except (TypeError, ValueError):
                assert action.type in (int, float), name


def test_inspect_the_lock(tmp_path, capsys):
    lock = tmp_path / "lock"
    kind = "lock file of a daemon directory"
    for text, code, line in (
        (b"", 0, ""),
        (b"123\n", 0, "  pid_of_last_daemon: 123\n"),
        (b"\xff", 1, "damaged: no pid: ff\n"),
    ):
        lock.write_bytes(text)
        assert kvtier.cli.main(["inspect", str(lock)]) == code
        assert capsys.readouterr().out == f"{lock}: {kind}\n{line}"
