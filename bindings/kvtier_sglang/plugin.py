"""The entry point `kvtier` of the group `sglang.srt.plugins`: SGLang calls `register` at the start
of each of its processes.

What it hooks tells kvtier_sglang.weights of online updates and of flushes. Each hook calls what it
hooks exactly once and passes on what that returns or raises. Only processes that have a scheduler
are hooked; without a kvtier backend the hooks keep a name up to date and do nothing else.

Hooks run in the scheduler's thread. Written for SGLang 0.5.23; what an older one does not have is
left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_serving

from kvtier_sglang.weights import WEIGHTS

__all__ = ["register"]

log = logging.getLogger(__name__)

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_UPDATES: Final = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def register() -> None:
    """Registers the hooks; SGLang puts them into place afterwards."""
    if _SCHEDULER not in sys.modules or _UPDATER not in sys.modules:
        return
    updater = f"{_UPDATER}.SchedulerWeightUpdaterManager"
    scheduler = f"{_SCHEDULER}.Scheduler"
    hooks: dict[str, Callable[..., Any]] = {f"{updater}.{name}": update for name in _UPDATES}
    hooks[f"{updater}.begin_weight_update"] = begin_session
    hooks[f"{updater}.end_weight_update"] = end_session
    hooks[f"{scheduler}.__init__"] = launch
    hooks[f"{scheduler}.flush_cache"] = flush
    hooks[f"{scheduler}.handle_update_weight_version"] = name_weights
    for target, hook in hooks.items():
        module, holder, method = target.rsplit(".", 2)
        if hasattr(getattr(sys.modules[module], holder, None), method):
            HookRegistry.register(target, hook, HookType.AROUND)
        else:
            log.warning("kvtier: this SGLang has no %s; what it would change is not seen", target)
    WEIGHTS.is_watching = True


def launch(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Around the making of a scheduler: the file of its server's socket is new at every launch."""
    ports = options.get("port_args", args[1] if len(args) > 1 else None)
    socket = str(getattr(ports, "scheduler_input_ipc_name", ""))
    if socket.startswith("ipc://"):
        WEIGHTS.launched_as(f"{socket.removeprefix('ipc://')} {getattr(ports, 'nccl_port', '')}")
    return original(scheduler, *args, **options)


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around update_weights_from_*: `request.weight_version` is what the new weights are called."""
    version = request.weight_version
    if version == get_serving().weight_version:
        version = None  # the name of the weights before
    path = getattr(request, "model_path", None)
    if version is not None and path is not None:
        version = f"{version} from {path}"
    WEIGHTS.change_begins()
    is_done = False
    try:
        output = original(manager, request)
        is_done = bool(output.success)
    finally:
        WEIGHTS.change_ends(version, is_done=is_done)
    return output


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around begin_weight_update."""
    output = original(manager, request)
    if output.success:
        WEIGHTS.session_begins()
    return output


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around end_weight_update, which changes weights once more, or for the first time."""
    output = original(manager, request)
    if output.success:
        WEIGHTS.session_ends(is_clean=_has_no_kv(manager.scheduler))
    return output


def flush(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Around flush_cache."""
    is_flushed = original(scheduler, *args, **options)
    if is_flushed:
        WEIGHTS.flushed()
    return is_flushed


def name_weights(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around /update_weight_version."""
    before = get_serving().weight_version
    output = original(scheduler, request)
    if request.new_version not in (None, before):
        WEIGHTS.named(request.new_version)
    return output


def _has_no_kv(scheduler: Any) -> bool:
    """Whether no request runs and the tree is empty. False where that cannot be seen."""
    sizes = getattr(scheduler.tree_cache, "total_size", lambda: None)()
    if sizes is None:
        return False
    total = sum(sizes) if isinstance(sizes, tuple) else sizes
    return total == 0 and bool(scheduler.is_fully_idle(ignore_waiting=True))
