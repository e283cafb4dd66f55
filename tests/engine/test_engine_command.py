"""`kvtier engine` as a process: it serves, says where, and ends on a signal."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

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


def test_it_serves_a_gguf_file_without_a_daemon_and_ends_in_order(tmp_path: Path) -> None:
    gguf = gguf_of(tiny_model(), tmp_path / "tiny.gguf")
    words = ["engine", "--model", str(gguf), "--port", "0", "--page-tokens", "16"]
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words, "--kvtier", f"unix://{tmp_path}/none.sock"],
        stderr=subprocess.PIPE,
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
        connection = http.client.HTTPConnection("127.0.0.1", int(ready[1]), timeout=50)
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=50)
        assert process.returncode == 0, said + rest
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
