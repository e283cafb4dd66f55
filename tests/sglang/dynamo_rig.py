"""NVIDIA Dynamo's standalone KV indexer, a process of its own: what it makes of KV events."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier_sglang.events.outlet import Endpoints
from tests.sglang.environment import DYNAMO

__all__ = ["NOTHING", "Found", "Indexer", "needs_dynamo"]

needs_dynamo = pytest.mark.skipif(
    not (DYNAMO / ".installed").exists(), reason="needs a real Dynamo: make dynamo-env"
)

_START_S = 60.0
_ANSWER_S = 10.0
_COMES_S = 20.0
_MODEL = "m"


class Found(NamedTuple):
    """Tokens from a prompt's head on: on the device; there or in host memory; or anywhere."""

    gpu: int
    cpu: int
    disk: int


NOTHING = Found(gpu=0, cpu=0, disk=0)


class Indexer:
    """Listens when it is made, on all addresses: it has no setting for that. Close it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # With a way to pause a listener, which is for tests alone.
        environment = os.environ | {"DYN_KV_INDEXER_TEST_ENDPOINTS": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(DYNAMO / "bin" / "python"), "-m", "dynamo.indexer", "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
            )
        ends = time.monotonic() + _START_S
        while not self._is_up():
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.05)
        self._said_at_start = len(log.read_text())

    def register(self, worker: int, endpoints: Endpoints, block_tokens: int) -> None:
        """Listens to what is published there, as that of `worker`."""
        self._post(
            "register",
            instance_id=worker,
            endpoint=endpoints.events,
            replay_endpoint=endpoints.replay,
            model_name=_MODEL,
            block_size=block_tokens,
        )

    def unregister(self, worker: int) -> None:
        self._post("unregister", instance_id=worker, model_name=_MODEL)

    def found(self, worker: int, tokens: Sequence[int]) -> Found:
        """What it knows `worker` to have of a prompt."""
        answer = self._post("query", model_name=_MODEL, token_ids=list(tokens))
        of = answer["instances"].get(str(worker))
        return NOTHING if of is None else Found(*(of[tier] for tier in Found._fields))

    def comes_to(self, wanted: Found, worker: int, tokens: Sequence[int]) -> None:
        """Waits until it knows just that."""
        ends = time.monotonic() + _COMES_S
        while (found := self.found(worker, tokens)) != wanted:
            assert time.monotonic() < ends, (found, self._log.read_text()[-4000:])
            time.sleep(0.05)

    def misses_what_comes(self, worker: int) -> None:
        """Until `listens_again`."""
        self._post("test/pause_listener", instance_id=worker)

    def listens_again(self, worker: int) -> None:
        self._post("test/resume_listener", instance_id=worker)

    def complaints(self) -> set[str]:
        """What it has warned of since it listens: the beginnings of the sentences."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text()[self._said_at_start :])
        return set(re.findall(r"^\S+ +(?:WARN|ERROR) [\w:]+: ([^:\n]*)", log, re.MULTILINE))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_up(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._url}/health", timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True

    def _post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._url}/{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code}: {error.read().decode()}") from None
