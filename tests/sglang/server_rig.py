"""A real SGLang server without an accelerator, and what a client asks of it.

Runs in the environment of `make sglang-env`, in processes of its own. Every wait has a limit; a
server that is closed is killed with all it started. Requests may be sent from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.environment import ENVIRONMENT, HERE

__all__ = ["PAGE", "Answer", "Server", "extra_config", "storable"]

PAGE = 16
ADMIN_KEY = "admin"
NEW_TOKENS = 12
_READY_S = 600.0
_ANSWER_S = 300.0
_END_S = 60.0
_COMMON = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--mem-fraction-static": "0.5",
    "--max-total-tokens": "4096",
    "--context-length": "2048",
    "--hicache-ratio": "2",
    "--hicache-io-backend": "direct",
    "--hicache-mem-layout": "page_first_direct",
    "--hicache-write-policy": "write_through",
    "--hicache-storage-prefetch-policy": "wait_complete",
    "--hicache-storage-backend": "dynamic",
    "--admin-api-key": ADMIN_KEY,
    "--random-seed": "1",
}
_FLAGS = (
    "--disable-overlap-schedule",
    "--enable-hierarchical-cache",
    "--enable-cache-report",
    "--enable-metrics",
)


def extra_config(url: str, **options: Any) -> dict[str, Any]:
    """The extra config of a backend on the daemon at `url`."""
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvTierHiCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        "hicache_storage_pass_prefix_keys": True,
        "kvtier_endpoint": url,
    } | options


def storable(answer: Answer, page: int = PAGE) -> int:
    """How many tokens of a prompt can come from storage: whole pages, and one token is computed."""
    return (answer.prompt_tokens - 1) // page * page


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`found` says how many tokens came from where; nothing of what was computed."""

    text: str
    prompt_tokens: int
    found: dict[str, int]
    seconds: float = field(compare=False)


class Server:
    """Starts with `start` or `with`; what it says goes to `log`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        extra: dict[str, Any],
        *,
        environment: dict[str, str] | None = None,
        **options: str,
    ) -> None:
        self.log_path = log
        self._environment = environment or {}
        self._model = model
        self._extra = extra
        # With float32 rounding does not turn one greedy word into another, whatever runs beside it.
        self._options = {"--page-size": str(PAGE), "--dtype": "float32"} | {
            f"--{name.replace('_', '-')}": value for name, value in options.items()
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def _ranks(self) -> int:
        return int(self._options.get("--tp-size", "1"))

    def begin(self) -> Server:
        """Starts it without waiting for it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        words = {
            "--model-path": str(self._model),
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--hicache-storage-backend-extra-config": json.dumps(self._extra),
        }
        words = _COMMON | words | self._options
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [str(ENVIRONMENT / "bin" / "python"), "-m", "sglang.launch_server", *_FLAGS,
                 *(word for pair in words.items() for word in pair)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | _environment(self._ranks) | self._environment,
                start_new_session=True,
            )  # fmt: skip
        return self

    def start(self) -> Server:
        self.begin()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        until = time.monotonic() + _READY_S
        while True:
            assert self._process is not None
            assert self._process.poll() is None, f"the server has ended:\n{self.log[-6000:]}"
            assert time.monotonic() < until, f"not ready in time:\n{self.log[-6000:]}"
            with contextlib.suppress(OSError):
                self._send("GET", "/health_generate", None, seconds=30.0)
                return
            time.sleep(0.2)

    def generate(self, prompt: str, **options: Any) -> Answer:
        """Greedy. `options` are fields of the request: cache_salt, extra_key."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        began = time.monotonic()
        said = self._send(
            "POST",
            "/generate",
            {"text": prompt, "sampling_params": sampling} | options,
        )
        details = said["meta_info"].get("cached_tokens_details") or {}
        return Answer(
            text=said["text"],
            prompt_tokens=said["meta_info"]["prompt_tokens"],
            found={
                name: count for name, count in details.items() if isinstance(count, int) and count
            },
            seconds=time.monotonic() - began,
        )

    def generate_at_once(self, prompts: list[str]) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.generate, prompts))

    def flush(self) -> None:
        """Drops what device and host hold. Waits until the server has nothing to do."""
        self._send("POST", "/flush_cache?timeout=60", {})

    def metrics(self) -> dict[str, float]:
        """What /metrics says, by name and outcome; of other labels the sum."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._port}/metrics", timeout=_ANSWER_S
        ) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("#"):
                continue
            labelled, _, value = line.rpartition(" ")
            name = labelled.partition("{")[0]
            outcome = re.search(r'outcome="(\w+)"', labelled)
            key = f"{name} {outcome.group(1)}" if outcome else name
            found[key] = found.get(key, 0.0) + float(value)
        return found

    def clear_storage(self) -> None:
        self._send("POST", "/hicache/storage-backend/clear", {})

    def detach(self) -> None:
        self._send("DELETE", "/hicache/storage-backend", None)

    def attach(self) -> None:
        self._send(
            "PUT",
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config_json": json.dumps(self._extra),
                "hicache_storage_prefetch_policy": "wait_complete",
            },
        )

    def update_weights(self, model: Path, **options: Any) -> dict[str, Any]:
        """From the directory of a model."""
        return self._send("POST", "/update_weights_from_disk", {"model_path": str(model)} | options)

    def begin_weight_update(self) -> None:
        self._send("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        self._send("POST", "/end_weight_update", {})

    def update_weight_version(self, version: str) -> None:
        self._send("POST", "/update_weight_version", {"new_version": version})

    def close(self) -> None:
        if self._process is None:
            return
        # First politely: Python's own helper removes the semaphores that the others leave behind.
        group = self._process.pid
        mapped = _shared_memory(group)
        self._process.terminate()
        until = time.monotonic() + _END_S
        while self._process.poll() is None or _has_members(group):
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                break
            time.sleep(0.05)
        self._process.wait(_END_S)
        self._process = None
        for name in mapped:  # SGLang's own, which processes that are killed leave behind
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)

    def __enter__(self) -> Server:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(
        self, method: str, path: str, body: object, *, seconds: float = _ANSWER_S
    ) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace")
            raise OSError(f"{method} {path}: {error.code} {reason}") from None
        return json.loads(said) if said.startswith(b"{") else {}


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _shared_memory(group: int) -> set[str]:
    """Names in /dev/shm that processes of this group have mapped."""
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                maps = (entry / "maps").read_text(encoding="utf-8", errors="replace")
                found.update(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
    return found


def _environment(ranks: int) -> dict[str, str]:
    # Without it SGLang wants a NUMA node for each rank.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks)} if ranks > 1 else {}
    paths = (HERE / "server_hooks", HERE / "stubs", HERE)
    return cores | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        # What a start compiles is kept, also where the environment says not to.
        "PYTHONDONTWRITEBYTECODE": "",
    }
