"""KV as fp8 beside bfloat16 in the bundled engine: room, throughput, and what it does to answers.

    python -m benchmarks.engine_kv [--quick] [--rounds 3] [--json FILE]

SmolLM2-135M in bfloat16 on the CPU, pages of 32 tokens, greedy, random prompts of 96 tokens and 17
more, tag checks on; decoding alone is timed. `kv/fp8-best`: as many requests at once as were found
to fit, each with all its pages, into one pool of POOL_BYTES, for both. `kv/fp8-single` is one
request in such a pool. Room is counted in bytes that are there.
KL divergence and agreement are of the text that comes with kvtier: contexts of 128 tokens, and 64
tokens after each, both computed over pages of either kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.resources import files

import torch

from benchmarks.common import in_turn
from benchmarks.engine_decode import PAGE_TOKENS, Work, engine_rate, work_of
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Row, Target
from kvtier import Codec
from kvtier.client.device import DevicePool
from kvtier_engine.engine import Engine
from kvtier_engine.fidelity.measures import Divergence, Likelihood, divergence, likelihood
from kvtier_engine.fidelity.scorer import Scorer
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.request import Request, Sampling
from kvtier_engine.settings import KvCacheDtype, layout_of
from kvtier_engine.smollm2 import ensure_model

PLAIN, FP8 = KvCacheDtype.AS_COMPUTED, KvCacheDtype.FP8_E4M3
#: Of each pool, and of each request at most: prompt, what it decodes while others are computed, and
#: what is timed. How many fit is measured (`running_at_once`).
POOL_BYTES, REQUEST_TOKENS = 26_000_000, 160
#: More than fit.
ASKED = 64
PROMPT_TOKENS, TOKENS = 96, 17
CONTEXT, REST = 128, 64


def pages_in(model: LoadedModel, nbytes: int, kv_cache: KvCacheDtype) -> DevicePool:
    """The largest pool of no more than so many bytes."""
    layout = layout_of(model, page_tokens=PAGE_TOKENS, kv_cache=kv_cache)
    return DevicePool(layout, nbytes // layout.raw_bytes)


def running_at_once(model: LoadedModel, pool: DevicePool, tokens: int) -> int:
    """How many requests have their pages when more ask than fit. Raises RuntimeError if all do."""
    engine = Engine(model, pool)
    sampling = Sampling(max_tokens=2, ignore_end=True)
    for number in range(ASKED):
        engine.submit(Request(prompt=(100 + number,) * tokens, sampling=sampling))
    engine.step()
    running = engine.stats()["requests_running"]
    engine.close()
    if running == ASKED:
        raise RuntimeError(f"{pool.pages} pages have room for all {ASKED} requests")
    return running


def room(model: LoadedModel) -> Iterator[Measured]:
    pools = [pages_in(model, POOL_BYTES, kv_cache) for kv_cache in (FP8, PLAIN)]
    ours, theirs = ((pool.pages * PAGE_TOKENS, pool.rows.nbytes) for pool in pools)
    yield Row.of_pairs(
        "kv/fp8-tokens",
        f"tokens in a pool of {POOL_BYTES / 1e6:.0f} MB",
        [(ours[0], theirs[0])],
        "tokens",
        "bfloat16",
        target=Target(bound=Bound.AT_LEAST, number=1.9),
        note=f"{ours[1]} and {theirs[1]} bytes",
    )
    at_once = [running_at_once(model, pool, REQUEST_TOKENS) for pool in pools]
    yield Row.of_pairs(
        "kv/fp8-requests",
        f"requests of {REQUEST_TOKENS} tokens at once in the same pools",
        [(at_once[0], at_once[1])],
        "requests",
        "bfloat16",
    )


def rate_in_pool(model: LoadedModel, work: Work, kv_cache: KvCacheDtype) -> float:
    """Tokens a second in the pool of POOL_BYTES. Raises RuntimeError for work that does not fit."""
    if work.request_tokens > REQUEST_TOKENS:
        raise RuntimeError(f"a request comes to {work.request_tokens} of {REQUEST_TOKENS} tokens")
    pool = pages_in(model, POOL_BYTES, kv_cache)
    if work.pages > pool.pages:
        raise RuntimeError(f"{work.pages} pages are needed, and {pool.pages} there")
    return engine_rate(model, work, pool)


def speed(model: LoadedModel, plan: Plan) -> Iterator[Measured]:
    tokens = plan.sized(TOKENS, 4)
    packed, plain = (
        running_at_once(model, pages_in(model, POOL_BYTES, kv_cache), REQUEST_TOKENS)
        for kv_cache in (FP8, PLAIN)
    )
    for name, what, ours, theirs in (
        ("kv/fp8-best", f"decode of {packed} requests, fp8", packed, plain),
        ("kv/fp8-single", "decode of one request, fp8", 1, 1),
    ):
        if not plan.wants(name):
            continue
        progress(name)

        def rate(batch: int, kv_cache: KvCacheDtype, number: int) -> float:
            vocabulary = model.network.config.vocab_size
            work = work_of(vocabulary, batch, tokens, plan.seed + number, PROMPT_TOKENS)
            return rate_in_pool(model, work, kv_cache)

        pairs = in_turn(
            lambda number, batch=ours, rate=rate: rate(batch, FP8, number),
            lambda number, batch=theirs, rate=rate: rate(batch, PLAIN, number),
            plan.rounds(2 if ours > 1 else 5),
            warm=1 if ours == 1 else 0,
        )
        yield Row.of_pairs(
            name,
            what,
            pairs,
            "tokens/s",
            f"bfloat16, {theirs} at once",
            note=f"{torch.get_num_threads()} threads",
        )


def answers(model: LoadedModel, plan: Plan) -> Iterator[Measured]:
    text = (files("kvtier_engine") / "fidelity" / "text.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)
    scorers = [
        Scorer(model, page_tokens=PAGE_TOKENS, tokens_max=CONTEXT + REST, kv_cache=kv_cache)
        for kv_cache in (PLAIN, FP8)
    ]
    parts, costs = list[Divergence](), list[tuple[Likelihood, Likelihood]]()
    windows = min(plan.sized(6, 2), len(tokens) // (CONTEXT + REST))
    for window in range(windows):
        at = window * (CONTEXT + REST)
        context, rest = tokens[at : at + CONTEXT], tokens[at + CONTEXT : at + CONTEXT + REST]
        plain, packed = (
            scorer.logits(context, [rest[:-1]], [Codec.RAW])[Codec.RAW][0] for scorer in scorers
        )
        parts.append(divergence(plain, packed))
        wanted = torch.tensor(rest)
        costs.append((likelihood(plain, wanted), likelihood(packed, wanted)))
    whole = Divergence.of_all(parts)
    note = f"{windows} windows, {whole.tokens} tokens"
    yield Row.of_values(
        "kv/fp8-kl",
        "KL divergence of the next token, fp8 from bfloat16 pages",
        [part.kl_mean for part in parts],
        "nats",
        note=f"{note}; mean {whole.kl_mean:.4f}, greatest {whole.kl_max:.3f}",
    )
    yield Row.of_values(
        "kv/fp8-agreement",
        "next tokens that are the same",
        [100 * part.agreement for part in parts],
        "%",
        note=f"{note}; of all {100 * whole.agreement:.1f} %",
    )
    plain_cost, packed_cost = (Likelihood.of_all(side) for side in zip(*costs, strict=True))
    yield Row.of_pairs(
        "kv/fp8-perplexity",
        "perplexity of the text over fp8 pages",
        [(packed_cost.perplexity, plain_cost.perplexity)],
        "",
        "bfloat16",
        note=note,
    )


def rows(plan: Plan) -> Iterator[Measured]:
    model = load_model(ensure_model().directory, dtype=torch.bfloat16)
    if plan.wants("kv/fp8-tokens") or plan.wants("kv/fp8-requests"):
        yield from room(model)
    if plan.wants("kv/fp8-best") or plan.wants("kv/fp8-single"):
        yield from speed(model, plan)
    if any(map(plan.wants, ("kv/fp8-kl", "kv/fp8-agreement", "kv/fp8-perplexity"))):
        progress("kv/fp8-kl")
        yield from answers(model, plan)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("KV as fp8", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
