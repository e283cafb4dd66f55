"""The hooks into SGLang's scheduler: what they tell, and that nothing of theirs reaches it.

SGLang itself is not here; its modules are stand-ins with the names that the plugin takes.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from kvtier_sglang.events.blocks import Chains
from kvtier_sglang.weights import LoadedWeights, Outcome

NO_SESSION = (
    "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
)


class Broken(Exception):
    pass


def broken(*_args, **_options):
    raise Broken


class Cache:
    """What it was told last: a name, or None for a pause."""

    def __init__(self) -> None:
        self.weights: str | None = ""

    def pause(self) -> None:
        self.weights = None

    def resume(self, weights: str) -> None:
        self.weights = weights


@pytest.fixture
def sglang(monkeypatch):
    """What the server says of itself."""
    says = SimpleNamespace(
        serving=SimpleNamespace(weight_version="default"),
        parallel=SimpleNamespace(tp_size=1, pp_size=1),
        exec=SimpleNamespace(features=SimpleNamespace(enable_weights_cpu_backup=False)),
    )
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry, registry.HookType = SimpleNamespace(), SimpleNamespace(AROUND="around")
    context = ModuleType("sglang.srt.runtime_context")
    context.get_serving = lambda: says.serving
    context.get_parallel = lambda: says.parallel
    context.get_exec = lambda: says.exec
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    monkeypatch.delitem(sys.modules, "kvtier_sglang.plugin", raising=False)
    says.plugin = importlib.import_module("kvtier_sglang.plugin")
    monkeypatch.setattr(says.plugin, "WEIGHTS", LoadedWeights())
    monkeypatch.setattr(says.plugin, "agreed", broken)
    yield says
    sys.modules.pop("kvtier_sglang.plugin")


@pytest.fixture
def cache(sglang):
    made = Cache()
    sglang.plugin.WEIGHTS.attach(made)
    return made


class Pool:
    def __init__(self, free: int) -> None:
        self.logical_size, self._free = 8, free

    def available_size(self):
        return self._free


def manager_of(*, on_device=0, free_on_host=8, session=None):
    tree = SimpleNamespace(
        total_size=lambda: on_device,
        cache_controller=SimpleNamespace(mem_pool_host=Pool(free_on_host)),
    )
    scheduler = SimpleNamespace(tree_cache=tree, is_fully_idle=lambda **_: True)
    return SimpleNamespace(
        scheduler=scheduler,
        tp_cpu_group="the group",
        _session=session,
        _select_runners=lambda: [("target", None)],
    )


def disk(version=None):
    return SimpleNamespace(weight_version=version, model_path="/m")


def tensor(version=None):
    return SimpleNamespace(weight_version=version)


def answers(sglang, message="", *, success=True, is_flushed=True):
    """An update that ends like this, having flushed what was cached."""

    def original(_manager, _request):
        if is_flushed:
            sglang.plugin.flush(lambda _scheduler: True, None)
        return SimpleNamespace(success=success, message=message)

    return original


def test_an_update_is_called_by_its_version(sglang, cache):
    sglang.plugin.update(answers(sglang), manager_of(), disk("v2"))
    assert cache.weights == "v2 from /m"
    sglang.plugin.update(answers(sglang, success=False), manager_of(), tensor("v3"))
    assert cache.weights not in ("v3", "v2 from /m", None)


def test_ranks_with_different_verdicts_have_no_name_that_others_have(sglang, cache, monkeypatch):
    """The other rank has failed: this one has its new weights, and wrong hidden states from it."""
    sglang.parallel.tp_size = 2
    asked = []

    def agreed(outcome, group):
        asked.append((outcome, group))
        return Outcome.DOUBTFUL

    monkeypatch.setattr(sglang.plugin, "agreed", agreed)
    sglang.plugin.update(answers(sglang), manager_of(), tensor("v2"))
    assert cache.weights not in ("v2", "", None)
    sglang.plugin.begin_session(answers(sglang), manager_of(), None)
    part = manager_of(session="open")
    sglang.plugin.update(answers(sglang), part, tensor("v3"))
    sglang.plugin.end_session(answers(sglang), part, None)
    assert cache.weights not in ("v3", "", None)
    assert asked == [(Outcome.DONE, "the group")] * 2, "once an update, once a session"


def test_two_ranks_agree_on_a_name(sglang, monkeypatch):
    """Two schedulers in threads, with one verdict each, over several updates."""
    sglang.parallel.tp_size = 2
    barrier, said = threading.Barrier(2, timeout=60), {}

    def agreed(outcome, _group):
        said[threading.current_thread().name] = outcome
        barrier.wait()
        found = outcome if len(set(said.values())) == 1 else Outcome.DOUBTFUL
        barrier.wait()
        return found

    local = threading.local()
    monkeypatch.setattr(sglang.plugin, "agreed", agreed)

    class PerThread:
        def __getattr__(self, name):
            return getattr(local.weights, name)

    monkeypatch.setattr(sglang.plugin, "WEIGHTS", PerThread())
    verdicts = [(True, False), (True, True), (False, False), (False, True), (True, True)]
    names = ([], [])

    def rank(number):
        local.weights, made = LoadedWeights(), Cache()
        local.weights.launched_as("server")
        local.weights.attach(made)
        for step, verdict in enumerate(verdicts):
            original = answers(sglang, "no", success=verdict[number])
            sglang.plugin.update(original, manager_of(), tensor(f"v{step}"))
            names[number].append(made.weights)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names[0] == names[1]
    shared = [name for name in names[0] if name in {f"v{step}" for step in range(5)}]
    assert shared == ["v1", "v4"]
    assert len(set(names[0])) == 5


def test_ranks_that_cannot_be_asked_have_a_name_of_their_server(sglang, cache):
    """Stages of a pipeline, and a collective that fails."""
    sglang.parallel.pp_size = 2
    sglang.plugin.WEIGHTS.launched_as("server")
    sglang.plugin.update(answers(sglang), manager_of(), tensor("v2"))
    assert cache.weights == "update 1 of server"
    sglang.plugin.name_weights(lambda *_: None, None, SimpleNamespace(new_version="v2"))
    assert cache.weights == "v2, update 1 of server"
    sglang.parallel = SimpleNamespace(tp_size=2, pp_size=1)
    sglang.plugin.update(answers(sglang), manager_of(), tensor("v3"))
    assert cache.weights is None, "until a flush"
    sglang.plugin.flush(lambda *_: True, None)
    assert cache.weights not in ("v3", None)


def test_without_a_backend_no_rank_is_asked_and_no_name_is_shared(sglang):
    sglang.parallel.tp_size = 2
    weights = sglang.plugin.WEIGHTS
    weights.launched_as("server")
    sglang.plugin.update(answers(sglang), manager_of(), tensor("v2"))
    assert (weights.name, weights.is_settled) == ("update 1 of server", True)
    sglang.parallel.tp_size = 1
    sglang.plugin.update(answers(sglang), manager_of(), tensor("v2"))
    assert (weights.name, weights.is_settled) == ("v2", True)


@pytest.mark.parametrize(
    ("manager", "is_clean"),
    [
        (manager_of(), True),
        (manager_of(on_device=4), False),
        (manager_of(on_device=(0, 1)), False),
        (manager_of(free_on_host=7), False),
        (SimpleNamespace(scheduler=None), False),
    ],
    ids=["nothing", "on the device", "of another kind", "on the host", "unseen"],
)
def test_a_session_is_clean_only_if_no_kv_is_left_anywhere(sglang, cache, manager, is_clean):
    sglang.plugin.begin_session(answers(sglang), manager, None)
    sglang.plugin.end_session(answers(sglang, is_flushed=False), manager, None)
    assert (cache.weights is not None) is is_clean


@pytest.mark.parametrize(
    ("request_", "message", "runners", "is_untouched"),
    [
        (tensor("v2"), NO_SESSION, 1, True),
        (disk("v2"), "Failed to get weights iterator: no such file.", 1, True),
        (disk("v2"), "Failed to get weights iterator: no such file.", 2, False),
        (tensor("v2"), "Failed to get weights iterator: no such file.", 1, False),
        (disk("v2"), "Failed to update weights: x. Rolling back.", 1, False),
    ],
    ids=["no session", "no file", "no file of the draft", "other kind", "rolled back"],
)
def test_a_refused_update_that_touched_nothing_ends_nothing(
    sglang, cache, request_, message, runners, is_untouched
):
    manager = manager_of()
    manager._select_runners = lambda: [None] * runners
    original = answers(sglang, message, success=False, is_flushed=False)
    sglang.plugin.update(original, manager, request_)
    assert (cache.weights == "") is is_untouched


def test_weights_whose_memory_was_given_back_are_no_weights(sglang, cache):
    """Until the next update, whose name counts as ever."""
    manager = manager_of()
    for tags, has_saver, has_copy, is_lost in [
        (["kv_cache"], True, False, False),
        (["weights"], False, False, False),
        (["weights"], True, True, False),
        (["weights"], True, False, True),
        (None, True, False, True),
    ]:
        sglang.exec.features.enable_weights_cpu_backup = has_copy
        manager.memory_saver_adapter = SimpleNamespace(enabled=has_saver)
        named, request = cache.weights, SimpleNamespace(tags=tags)
        assert sglang.plugin.resume_memory(lambda *_: "done", manager, request) == "done"
        assert (cache.weights is None) is is_lost
        sglang.plugin.flush(lambda _scheduler: True, None)
        assert (cache.weights != named) is is_lost
    sglang.plugin.update(answers(sglang), manager, tensor("v2"))
    assert cache.weights == "v2"


def test_a_check_that_overwrites_weights_is_seen(sglang, cache):
    for action, is_lost in [("snapshot", False), ("compare", False), ("reset_tensors", True)]:
        sglang.plugin.check_weights(lambda *_: None, None, SimpleNamespace(action=action))
        assert (cache.weights is None) is is_lost
    sglang.plugin.flush(lambda _scheduler: True, None)
    assert cache.weights not in ("", None)


@pytest.mark.parametrize(
    ("lacking", "is_watching"),
    [("", True), ("begin_weight_update", True), ("update_weights_from_ipc", False)],
)
def test_updates_are_watched_only_if_all_kinds_of_them_are(
    sglang, monkeypatch, lacking, is_watching
):
    plugin, hooked = sglang.plugin, []
    plugin.HookRegistry.register = lambda target, *_: hooked.append(target.rpartition(".")[2])
    methods = [*plugin._UPDATES, "begin_weight_update", "flush_cache"]
    made = type("Made", (), {name: None for name in methods if name != lacking})
    for name, holder in (
        (plugin._SCHEDULER, "Scheduler"),
        (plugin._UPDATER, "SchedulerWeightUpdaterManager"),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{holder: made}))
    plugin.register()
    assert {*methods} - {*hooked} == {lacking} - {""}
    assert plugin.WEIGHTS.is_watching is is_watching


class Raises:
    """Whatever is asked of it raises."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise Broken


HOOKS = ["launch", "update", "begin_session", "end_session", "flush", "name_weights",
         "resume_memory", "check_weights"]  # fmt: skip


@pytest.mark.parametrize("is_used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("hook", HOOKS)
def test_nothing_of_a_hook_reaches_the_scheduler(sglang, hook, is_used):
    """All that it looks at raises; what it hooks is called once, and its answer comes back."""
    weights, calls = sglang.plugin.WEIGHTS, []
    made = Cache()
    if is_used:
        weights.attach(made)
    sglang.serving = sglang.parallel = Raises()
    answer = True if hook == "flush" else SimpleNamespace(success=True, message="")
    if hook == "flush":
        weights.flushed = broken

    def original(*args, **options):
        calls.append((args, options))
        return answer

    request = SimpleNamespace(new_version="v2", weight_version="v2")
    args = {
        "launch": ("scheduler", "server args", Raises()),
        "flush": ("scheduler",),
        "name_weights": ("scheduler", request),
        "begin_session": (SimpleNamespace(_session=None), request),
    }.get(hook, (SimpleNamespace(_session=None), request))
    if hook == "begin_session":
        weights.session_begins = broken
    assert getattr(sglang.plugin, hook)(original, *args) is answer
    assert calls == [(args, {})]
    assert not weights.is_settled
    if is_used:
        assert made.weights is None


@pytest.mark.parametrize("hook", HOOKS)
def test_what_the_hooked_raises_goes_on(sglang, hook, cache):
    with pytest.raises(Broken):
        getattr(sglang.plugin, hook)(broken, manager_of(), disk("v2"))
    if hook in ("update", "begin_session", "end_session"):
        assert cache.weights is None


def test_a_cache_that_raises_is_not_the_end_of_an_update(sglang):
    bad, good = Cache(), Cache()
    bad.pause = bad.resume = broken
    for one in (bad, good):
        sglang.plugin.WEIGHTS.attach(one)
    for _ in range(2):
        assert sglang.plugin.update(answers(sglang), manager_of(), tensor("v2")).success
        assert good.weights is None


def test_tokens_of_pages_that_are_stored_or_asked_for_are_told(sglang, monkeypatch):
    chains = Chains()
    monkeypatch.setattr(sglang.plugin, "CHAINS", chains)
    inbox = chains.listen()
    calls = []

    def original(*args, **options):
        calls.append((args, options))
        return 7

    plugin = sglang.plugin
    assert plugin.write_storage(original, "it", [0], [1, 2], ["aa"], ["p", "q"], extra_pools=1) == 7
    assert plugin.write_storage(original, "it", [0], [3], hash_value=["bb"]) == 7
    key = SimpleNamespace(raw_token_ids=lambda: [4, 5])
    asked = SimpleNamespace(token_ids=key, all_hash_values=["cc"], last_hash="z")
    assert plugin.query_storage(original, "it", asked) == 7
    assert calls == [
        (("it", [0], [1, 2], ["aa"], ["p", "q"]), {"extra_pools": 1}),
        (("it", [0], [3]), {"hash_value": ["bb"]}),
        (("it", asked), {}),
    ]
    heard = [inbox.take() for _ in range(len(inbox))]
    assert [(list(chain.tokens), chain.hashes, chain.before) for chain in heard] == [
        ([1, 2], ("aa",), "q"),
        ([3], ("bb",), None),
        ([4, 5], ("cc",), "z"),
    ]
    assert plugin.query_storage(original, "it", Raises()) == 7
    assert plugin.write_storage(original, "it", Raises()) == 7
    assert plugin.write_storage(original, "it", [0], object(), ["dd"]) == 7
    pairs = [(1, 2), (2, 3)]  # as EAGLE has them: told to nobody, and logged by nobody
    assert plugin.write_storage(original, "it", [0], pairs, ["ee"]) == 7
    assert len(inbox) == 0
