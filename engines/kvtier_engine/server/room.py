"""Whether this machine has the device that was asked for, and memory for the pool there.

Called once, before the engine starts.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kvtier import Layout
from kvtier.client.device import DevicePool
from kvtier_engine.server.errors import OptionUnusable

__all__ = ["check_device", "free_bytes", "pool_of"]

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def check_device(device: str) -> None:
    """Raises OptionUnusable."""
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionUnusable(
            "--device cuda: torch sees no CUDA device here",
            remedy="leave --device out, or install a torch for CUDA and see nvidia-smi",
        )


def pool_of(layout: Layout, tokens: int, device: str) -> DevicePool:
    """At least `tokens` of KV, where that much memory is free: a pool that is larger is granted by
    the system all the same, and the process killed as it fills. Raises OptionUnusable.
    """
    pages = -(-tokens // layout.page_tokens)
    wanted, free = pages * layout.raw_bytes, free_bytes(device)
    try:
        if free is None or wanted <= free:
            return DevicePool(layout, pages, device)
    except (MemoryError, RuntimeError) as error:  # torch has the second for memory
        raise _too_large(tokens, wanted, "the device gives no such memory") from error
    raise _too_large(tokens, wanted, f"{free / 1e9:.1f} GB are free")


def _too_large(tokens: int, wanted: int, why: str) -> OptionUnusable:
    return OptionUnusable(
        f"--pool-tokens {tokens} needs {wanted / 1e9:.1f} GB, and {why}",
        remedy="pass fewer --pool-tokens, or --kv-cache-dtype fp8_e4m3 for half of the bytes",
    )


def free_bytes(device: str) -> int | None:
    """What can be taken now without taking it from others; None where the system does not say. Of
    the host it is what the machine has, and what the process's own cgroup lets it (version 2).
    """
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found = []
    try:
        found.append(_number_of("MemAvailable:", _MEMINFO) << 10)
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            used -= _number_of("inactive_file", _CGROUP / "memory.stat")  # given up when needed
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):
        pass  # no cgroup of that version, or another system
    return min(found, default=None)


def _number_of(name: str, file: Path) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(f"no {name} in {file}")
