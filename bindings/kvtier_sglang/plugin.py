"""The entry point `kvtier` of the group `sglang.srt.plugins`: SGLang calls `register` at the start
of each of its processes.

What it hooks tells kvtier_sglang.weights of online updates and of flushes, and kvtier_sglang.events
of the tokens of pages. Each hook calls what it
hooks exactly once and passes on what that returns or raises; nothing of its own reaches the
scheduler. Only processes that have a scheduler are hooked; without a kvtier backend the hooks keep
a name up to date and do nothing else: ranks are not asked then.

Hooks run in the scheduler's thread, but for `query_storage`. Written for SGLang 0.5.23; what an
older one does not have (the sessions of updates, up to 0.5.20) is left out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_parallel, get_serving

from kvtier_sglang.agreement import agreed
from kvtier_sglang.border import kept_inside
from kvtier_sglang.events.blocks import CHAINS
from kvtier_sglang.weights import WEIGHTS, Outcome

__all__ = ["register"]

log = logging.getLogger(__name__)

_SCHEDULER: Final = "sglang.srt.managers.scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater"
_CONTROLLER: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_UPDATES: Final = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
#: Without which updates of the weights would go unseen.
_NEEDED: Final = frozenset({*_UPDATES, "flush_cache"})
#: How SGLang's refusals end and begin that come before any weight is looked at.
_NO_SESSION: Final = "must run between begin_weight_update() and end_weight_update()"
_NOTHING_TO_LOAD: Final = ("Failed to get weights iterator:", "Failed to get model loader:")
#: SGLang's names of memory that is given back, and of what overwrites weights at random.
_WEIGHTS_TAG: Final = "weights"
_RESET: Final = "reset_tensors"


def register() -> None:
    """Registers the hooks; SGLang puts them into place afterwards."""
    if _SCHEDULER not in sys.modules or _UPDATER not in sys.modules:
        return
    updater = f"{_UPDATER}.SchedulerWeightUpdaterManager"
    scheduler = f"{_SCHEDULER}.Scheduler"
    hooks: dict[str, Callable[..., Any]] = {f"{updater}.{name}": update for name in _UPDATES}
    hooks[f"{updater}.begin_weight_update"] = begin_session
    hooks[f"{updater}.end_weight_update"] = end_session
    hooks[f"{updater}.resume_memory_occupation"] = resume_memory
    hooks[f"{updater}.check_weights"] = check_weights
    hooks[f"{scheduler}.__init__"] = launch
    hooks[f"{scheduler}.flush_cache"] = flush
    hooks[f"{scheduler}.handle_update_weight_version"] = name_weights
    controller = f"{_CONTROLLER}.HybridCacheController"
    hooks[f"{controller}.write_storage"] = write_storage
    hooks[f"{controller}._storage_hit_query"] = query_storage
    lacking = set()
    for target, hook in hooks.items():
        module, holder, method = target.rsplit(".", 2)
        if hasattr(getattr(sys.modules.get(module), holder, None), method):
            HookRegistry.register(target, hook, HookType.AROUND)
        else:
            log.warning("kvtier: this SGLang has no %s; what it would change is not seen", target)
            lacking.add(method)
    WEIGHTS.is_watching = lacking.isdisjoint(_NEEDED)


def launch(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Around the making of a scheduler: the file of its server's socket is new at every launch."""
    with _guarded("the launch"):
        ports = options.get("port_args", args[1] if len(args) > 1 else None)
        socket = str(getattr(ports, "scheduler_input_ipc_name", ""))
        if socket.startswith("ipc://"):
            name = f"{socket.removeprefix('ipc://')} {getattr(ports, 'nccl_port', '')}"
            WEIGHTS.launched_as(name)
    return original(scheduler, *args, **options)


def update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around update_weights_from_*: `request.weight_version` is what the new weights are called."""
    version, outcome = None, Outcome.DOUBTFUL
    # The same on all ranks, whatever fails here: whether they are asked hangs on it.
    is_part = getattr(manager, "_session", None) is not None
    with _guarded("the beginning of an update"):
        WEIGHTS.change_begins()
        version = _version_of(request)
    try:
        output = original(manager, request)
        with _guarded("the outcome of an update"):
            outcome = _outcome_of(manager, request, output)
        if not is_part:
            outcome = _of_all_ranks(manager, outcome)
    finally:
        with _guarded("the end of an update"):
            WEIGHTS.change_ends(version, outcome)
    return output


def begin_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around begin_weight_update."""
    try:
        output = original(manager, request)
    except BaseException:
        WEIGHTS.lost()  # some weights may have been unpacked
        raise
    with _guarded("the beginning of a session"):
        if output.success:
            WEIGHTS.session_begins()
    return output


def end_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around end_weight_update, which changes weights once more, or for the first time."""
    try:
        output = original(manager, request)
    except BaseException:
        WEIGHTS.lost()
        raise
    if getattr(output, "success", False):
        outcome = _of_all_ranks(manager, WEIGHTS.session)
        is_clean = False
        with _guarded("what is cached at the end of a session"):
            is_clean = _has_no_kv(manager.scheduler)
        with _guarded("the end of a session"):
            WEIGHTS.session_ends(outcome, is_clean=is_clean)
    return output


def resume_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around resume_memory_occupation: of weights whose memory was given back, and which have no
    copy, nobody knows what they are until the next update.
    """
    output = original(manager, request)
    with _guarded("weights that come back"):
        if (
            _WEIGHTS_TAG in (request.tags or (_WEIGHTS_TAG,))
            and manager.memory_saver_adapter.enabled
            and not get_exec().features.enable_weights_cpu_backup
        ):
            _overwritten()
    return output


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around check_weights, of which one action is a test of updates: other weights at random."""
    output = original(manager, request)
    with _guarded("a check of the weights"):
        if request.action == _RESET:
            _overwritten()
    return output


def flush(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Around flush_cache."""
    is_flushed = original(scheduler, *args, **options)
    with _guarded("a flush"):
        if is_flushed:
            WEIGHTS.flushed()
    return is_flushed


def name_weights(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around /update_weight_version."""
    before = None
    with _guarded("the present version"):
        before = get_serving().weight_version
    output = original(scheduler, request)
    with _guarded("a new version"):
        if request.new_version not in (None, before):
            WEIGHTS.named(request.new_version)
    return output


def write_storage(original: Callable[..., Any], controller: Any, *args: Any, **more: Any) -> Any:
    """Around the order to store pages, in the scheduler's thread: which tokens they are of."""
    if CHAINS.has_listeners:
        with kept_inside("seeing the tokens of pages to store"):
            tokens, hashes, before = _of_order(*args, **more)
            CHAINS.tell(tokens, hashes, before[-1] if before else None)
    return original(controller, *args, **more)


def query_storage(original: Callable[..., Any], controller: Any, operation: Any) -> Any:
    """Around the question for a prompt's pages, in the prefetch thread."""
    answer = original(controller, operation)
    if CHAINS.has_listeners:
        with kept_inside("seeing the tokens of pages asked for"):
            tokens = operation.token_ids.raw_token_ids()
            CHAINS.tell(tokens, operation.all_hash_values, operation.last_hash)
    return answer


def _of_order(
    _host_indices: Any, token_ids: Any, hash_value: Any = None, prefix_keys: Any = None, **_: Any
) -> tuple[Any, Any, Any]:
    return token_ids, hash_value, prefix_keys


def _overwritten() -> None:
    """The weights are others than a moment ago, on all ranks, and nobody has named them."""
    WEIGHTS.change_begins()
    WEIGHTS.change_ends(None, Outcome.DOUBTFUL)


def _guarded(what: str) -> AbstractContextManager[None]:
    """Nothing that goes wrong here reaches the scheduler; what was not seen is in doubt, and all
    pages are misses until a flush.
    """
    return kept_inside(f"seeing {what}", WEIGHTS.lost)


def _version_of(request: Any) -> str | None:
    """What the new weights are to be called, None if nobody said."""
    version: str | None = request.weight_version
    if version == get_serving().weight_version:
        return None  # the name of the weights before
    path = getattr(request, "model_path", None)
    return version if version is None or path is None else f"{version} from {path}"


def _outcome_of(manager: Any, request: Any, output: Any) -> Outcome:
    """On this rank. UNTOUCHED only where SGLang returns before it has looked at a weight."""
    if output.success:
        return Outcome.DONE
    message = str(output.message)
    if message.endswith(_NO_SESSION):
        return Outcome.UNTOUCHED
    # With a draft model the weights of the target were loaded when the draft's cannot be. SGLang
    # 0.5.20 does not say whether there is one.
    runners: list[Any] = getattr(manager, "_select_runners", list)()
    is_only_one = len(runners) == 1
    if hasattr(request, "model_path") and is_only_one and message.startswith(_NOTHING_TO_LOAD):
        return Outcome.UNTOUCHED
    return Outcome.DOUBTFUL


def _of_all_ranks(manager: Any, outcome: Outcome) -> Outcome:
    """DOUBTFUL where they cannot be asked: then a name of this server alone is right, for it says
    no more than which of its updates this was.

    Stages of a pipeline are not asked: SGLang gives one an update when the stage before is through.
    """
    found = Outcome.DOUBTFUL
    with _guarded("what other ranks say of an update"):
        parallel = get_parallel()
        if parallel.pp_size > 1:
            return found
        if parallel.tp_size == 1:
            return outcome
        if WEIGHTS.has_cache:
            found = agreed(outcome, manager.tp_cpu_group)
    return found


def _has_no_kv(scheduler: Any) -> bool:
    """Whether no request runs, the tree is empty and no page of the host pool is taken. False where
    that cannot be seen.
    """
    tree = scheduler.tree_cache
    sizes = getattr(tree, "total_size", lambda: None)()
    if sizes is None:
        return False
    on_device = sum(sizes) if isinstance(sizes, tuple) else sizes
    # The tree's size is that on the device; what was moved out of it is on the host alone.
    controller = getattr(tree, "cache_controller", None)
    if controller is not None:
        pool = controller.mem_pool_host
        if pool.available_size() != pool.logical_size:
            return False
    return on_device == 0 and bool(scheduler.is_fully_idle(ignore_waiting=True))
