"""`kvtier engine` as a process: it serves, says where, and ends on a signal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import pytest

from kvtier_engine.errors import InvalidRequest
from kvtier_engine.server import command
from kvtier_engine.server.errors import NetworkUnprotected
from tests.engine.tiny_gguf import gguf_of, tiny_model

# The command as `kvtier` loads it, without the entry point of an installation.
CODE = """
import argparse, sys
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.server import command
parser = argparse.ArgumentParser()
command.register(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
sys.exit(args.run(args))
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
