"""`kvtier engine` as a process: it serves, says where, and ends on a signal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest
import torch

from kvtier.errors import KvtierError
from kvtier_engine.errors import InvalidRequest, ModelUnusable
from kvtier_engine.server import command, room
from kvtier_engine.server.errors import AddressUnusable, NetworkUnprotected, OptionUnusable
from tests.engine import engine_rig
from tests.engine.engine_rig import engine_of
from tests.engine.server_rig import to_the_end, until
from tests.engine.tiny_gguf import gguf_of, tiny_model

# The command as `kvtier` loads it, without the entry point of an installation.
CODE = """
import argparse, sys
from kvtier_engine.server import command
parser = argparse.ArgumentParser()
command.register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
"""


# Before it: fewer descriptors, soft and hard.
FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
"""

# Before it: a model that takes its time, so that a signal comes in the middle of an answer.
SLOW = """
import time
from kvtier_engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.02), step(engine))[1]
"""


@contextmanager
def command_of(code: str, tmp_path: Path, *words: str) -> Iterator[tuple[Popen[str], int]]:
    """The process and its port, once it serves."""
    gguf = gguf_of(tiny_model(), tmp_path / "tiny.gguf")
    process = Popen(
        [sys.executable, "-c", code, "engine", "--model", str(gguf), "--port", "0", *words],
        stderr=PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (ready := re.search(r"engine\.ready model=tiny url=http://[^:]+:(\d+)/v1", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, int(ready[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_serves_a_gguf_file_without_a_daemon_and_tells_its_clients_of_its_end(
    tmp_path: Path,
) -> None:
    words = ["--page-tokens", "16", "--kvtier", f"unix://{tmp_path}/none.sock"]
    with command_of(SLOW + CODE, tmp_path, *words) as (process, port):
        idle, busy = (http.client.HTTPConnection("127.0.0.1", port, timeout=50) for _ in "ab")
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
        idle.request("POST", "/v1/completions", json.dumps(body))
        answer = json.loads(idle.getresponse().read())
        assert answer["usage"]["completion_tokens"] == 3

        body |= {"max_tokens": 100, "stream": True, "logprobs": 0}
        busy.request("POST", "/v1/completions", json.dumps(body))
        response = busy.getresponse()
        assert b'"choices"' in response.readline()
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=50)
        assert process.returncode == 0, rest
        assert "Traceback" not in rest
        *_, last = response.read().decode().split("data: ")
        assert json.loads(last)["error"]["code"] == "engine_closed"
        idle.close()
        busy.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example", ""])
def test_the_network_is_let_in_only_where_somebody_says_so(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    server = SimpleNamespace(run=lambda args: served.append(args.host) or 0)
    monkeypatch.setattr(command.importlib, "import_module", lambda name: server)
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    with pytest.raises(NetworkUnprotected) as caught:
        command.run(parser.parse_args(["engine", "--host", host]))
    assert "--allow-insecure-network" in caught.value.remedy
    assert not served
    for words in (["--host", host, "--allow-insecure-network"], ["--host", "::1"], []):
        assert command.run(parser.parse_args(["engine", *words])) == 0
    assert served == [host, "::1", "127.0.0.1"]


def test_it_serves_over_fp8_pages(tmp_path: Path) -> None:
    words = ["--page-tokens", "16", "--kv-cache-dtype", "fp8_e4m3"]
    with command_of(CODE, tmp_path, *words) as (_, port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=50)
        body = {"model": "tiny", "prompt": "the cat " * 8, "max_tokens": 3, "ignore_eos": True}
        for cached in (0, 32):
            client.request("POST", "/v1/completions", json.dumps(body))
            usage = json.loads(client.getresponse().read())["usage"]
            assert usage["completion_tokens"] == 3
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        client.close()


def test_pages_in_another_dtype_than_the_network_are_refused(tmp_path: Path) -> None:
    gguf = gguf_of(tiny_model(), tmp_path / "tiny.gguf")
    words = ["--model", str(gguf), "--dtype", "float32", "--kv-cache-dtype", "bf16"]
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    with pytest.raises(InvalidRequest, match="--kv-cache-dtype bf16 with --dtype float32"):
        command.run(parser.parse_args(["engine", *words]))


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def health(port: int) -> bytes:
    """What is said of it; nothing where the connection is dropped."""
    with socket.create_connection(("127.0.0.1", port), timeout=40) as raw:
        try:
            raw.sendall(HEALTH)
            return to_the_end(raw)
        except ConnectionError:
            return b""


def test_idle_clients_do_not_use_up_its_descriptors(tmp_path: Path) -> None:
    with command_of(FEW + CODE, tmp_path) as (process, port):
        with ExitStack() as stack:
            for _ in range(400):
                idle = socket.create_connection(("127.0.0.1", port), timeout=40)
                stack.enter_context(idle)
            # Refused or dropped at once, and not when one of them has gone.
            assert not health(port).startswith(b"HTTP/1.1 200 ")
        until(lambda: health(port).startswith(b"HTTP/1.1 200 "))
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=50)
        assert process.returncode == 0
        assert "Traceback" not in rest
        assert len(rest) < 10_000


def refusal(kind: type[KvtierError], tmp_path: Path, *words: str) -> str:
    """Of a command without a model: whatever is refused is so before that is looked for."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    words = ("--model", str(tmp_path / "absent"), *words)
    with pytest.raises(kind) as caught:
        command.run(parser.parse_args(["engine", *words]))
    return f"{caught.value}; {caught.value.remedy}"


def test_an_address_that_cannot_be_had_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(AddressUnusable, tmp_path, "--port", str(port))
    assert said == f"--port {port}: somebody listens there already; pass another --port, or 0"
    words = ["--allow-insecure-network", "--port", "0", "--host"]
    for host in ("no.such.name.invalid", "x" * 70, "."):
        said = refusal(AddressUnusable, tmp_path, *words, host)
        assert said.startswith(f"--host {host}: ")
        assert said.endswith("; pass a name or an address of this machine")
    assert "absent" in refusal(ModelUnusable, tmp_path, "--port", "0")


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "http"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["engine", "--port", port])
    assert "argument --port: " in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refusal(OptionUnusable, tmp_path, "--port", "0", "--device", "cuda")
    assert said.startswith("--device cuda: torch sees no CUDA device here; leave --device out")


@pytest.mark.parametrize("tokens", [10**11, 10**16, 10**30])
def test_a_pool_that_does_not_fit_is_named(tokens: int, tmp_path: Path) -> None:
    gguf = gguf_of(tiny_model(), tmp_path / "tiny.gguf")
    words = ["--port", "0", "--model", str(gguf), "--pool-tokens", str(tokens)]
    said = refusal(OptionUnusable, tmp_path, *words)
    assert said.startswith(f"--pool-tokens {tokens} needs ")
    assert "pass fewer --pool-tokens" in said


def test_memory_that_the_device_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not say what is free."""
    layout = engine_of(engine_rig.tiny_model()).pool.layout
    monkeypatch.setattr(room, "free_bytes", lambda device: None)
    with pytest.raises(OptionUnusable, match="gives no such memory"):
        room.pool_of(layout, 10**14, "cpu")
    assert room.pool_of(layout, layout.page_tokens + 1, "cpu").pages == 2
