"""The server over its life: overload, an engine that hangs, numbers, and the end."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kvtier_engine
from kvtier_engine.engine import Engine
from kvtier_engine.server.metrics import metrics_text
from tests.engine.engine_rig import engine_of, greedy, prompt_of, tiny_model
from tests.engine.server_rig import post_of, serve, to_the_end, until

LONG = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """The engine's thread stands still, in the middle of a step."""
    stands, goes = threading.Event(), threading.Event()

    def sink(_: object) -> None:
        stands.set()
        goes.wait(50)

    handle = engine.submit(greedy(prompt_of(3, seed=1), 1), sink=sink)
    assert stands.wait(40)
    try:
        yield
    finally:
        goes.set()
    assert handle.number


def test_over_the_bound_it_is_429_with_retry_after() -> None:
    engine = engine_of(tiny_model(), queue_requests_max=1, running_requests_max=1)
    for served in serve(engine):
        with held(engine), served.connect() as waiting:
            waiting.sendall(post_of("/v1/completions", prompt="abc", max_tokens=2))
            until(lambda: engine.stats()["requests_waiting"] == 1)
            for body in ({"prompt": "abc"}, {"prompt": "a" * 5000}):
                status, content, headers = served.post("/v1/completions", **body)
                assert (status, headers["retry-after"]) == (429, "1")
                assert content["error"]["code"] == "queue_full"
        assert "\nkvtier_engine_requests_refused_total 2\n" in served.call("GET", "/metrics")[1]
        until(lambda: engine.stats()["requests_waiting"] == 0)
        assert served.post("/v1/completions", prompt="abc")[0] == 200


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough for both ends of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="few descriptors")
@pytest.mark.usefixtures("descriptors")
def test_a_thousand_clients_at_once_are_all_answered() -> None:
    ask = post_of("/v1/completions", prompt="abc", max_tokens=2, ignore_eos=True)
    ask = ask.replace(b"host: x", b"host: x\r\nconnection: close")

    async def answer(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ask)
        said = await reader.read()
        writer.close()
        return said

    async def answers(port: int) -> list[bytes]:
        return await asyncio.gather(*(answer(port) for _ in range(1000)))

    engine = engine_of(tiny_model(), queue_requests_max=20, running_requests_max=4)
    for served in serve(engine):
        said = asyncio.run(answers(served.port))
        done = [one for one in said if one.startswith(b"HTTP/1.1 200 ")]
        refused = [one for one in said if one.startswith(b"HTTP/1.1 429 ")]
        assert len(done) + len(refused) == 1000
        assert len(done) >= 20
        assert all(b"\r\nretry-after: 1\r\n" in one for one in refused)
        assert served.call("GET", "/health")[0] == 200
        until(lambda: not engine.has_work)


def test_one_long_text_stops_nobody() -> None:
    """Bodies are read in threads: while both are busy the loop answers, and counts them."""
    model = tiny_model()
    entered, goes = threading.Semaphore(0), threading.Event()
    encode = model.tokenizer.encode

    def slow(text: str, *, special: bool = True) -> list[int]:
        entered.release()
        goes.wait(50)
        return encode(text, special=special)

    model.tokenizer.encode = slow  # type: ignore[method-assign]
    for served in serve(engine_of(model), encodings_max=2):
        with served.connect() as one, served.connect() as two:
            for raw in (one, two):
                raw.sendall(post_of("/v1/completions", prompt="abc", max_tokens=1))
                assert entered.acquire(timeout=40)
            assert served.call("GET", "/health")[0] == 200
            assert served.post("/v1/completions", prompt="abc")[0] == 429
            goes.set()
            assert one.recv(1000).startswith(b"HTTP/1.1 200 ")
            assert two.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert served.post("/v1/completions", prompt="abc")[0] == 200


def test_what_is_surely_too_long_is_not_encoded() -> None:
    model = tiny_model()

    def never(text: str, *, special: bool = True) -> list[int]:
        raise AssertionError("encoded")

    model.tokenizer.encode = never  # type: ignore[method-assign]
    for served in serve(engine_of(model)):
        text = "a" * (16 * 512 + 1)
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": [5] * 513}),
        ):
            status, content, _ = served.post(path, **body)
            assert (status, content["error"]["code"]) == (400, "context_length_exceeded")
            assert content["error"]["param"] in body
        assert served.post("/v1/completions", prompt=text, model="other")[0] == 404


def test_an_engine_without_steps_is_stalled_and_recovers() -> None:
    engine = engine_of(tiny_model())
    for served in serve(engine, stall_seconds_max=0.5):
        assert served.call("GET", "/health")[:2] == (200, {"status": "ok"})
        with held(engine):
            until(lambda to=served: to.call("GET", "/health")[0] == 503)
            assert served.call("GET", "/health")[1] == {"status": "stalled"}
            _, text, _ = served.call("GET", "/metrics")
            age = text.partition("\nkvtier_engine_step_age_seconds ")[2].partition("\n")[0]
            assert float(age) >= 0.5
        until(lambda to=served: to.call("GET", "/health")[0] == 200)


def test_all_counters_are_there_from_the_beginning() -> None:
    for served in serve(engine_of(tiny_model())):
        _, before, _ = served.call("GET", "/metrics")
        served.post("/v1/completions", **LONG | {"max_tokens": 20})
        served.post("/v1/completions", **LONG | {"max_tokens": 20})
        _, after, _ = served.call("GET", "/metrics")

        def names(text: str) -> list[str]:
            return [line.split()[0] for line in text.splitlines() if line[0] != "#"]

        assert names(after) == names(before)
        for name in ("requests_done", "requests_cancelled", "load_corrupt_pages"):
            assert f"\nkvtier_engine_{name}_total 0\n" in before
        assert "\n# TYPE kvtier_engine_step_age_seconds gauge\n" in before


def test_what_the_engine_counts_is_among_them() -> None:
    """By its sources: a counter that appears with the first fault is missed by who watches it."""
    place = Path(kvtier_engine.__file__).parent
    text = "".join(file.read_text(encoding="utf-8") for file in place.rglob("*.py"))
    counted = set(re.findall(r'counts\["(\w+)"\]', text))
    shown = metrics_text({})
    assert {"nonfinite", "transfers_failed", "preemptions"} <= counted
    now = {"requests_running", "requests_waiting", "pages", "pages_free", "pages_cached"}
    missing = {name for name in counted - now if f"kvtier_engine_{name}_total 0" not in shown}
    assert missing == {"stale_prefix_pages"}  # of the tree: there from the beginning


def test_the_end_is_told_to_everybody() -> None:
    engine = engine_of(tiny_model(), running_requests_max=1)
    for served in serve(engine):
        with held(engine), served.connect() as streamed, served.connect() as whole:
            streamed.sendall(post_of("/v1/chat/completions", messages=HELLO, stream=True))
            said = b""
            while b"assistant" not in said:
                said += streamed.recv(1 << 16)
            whole.sendall(post_of("/v1/completions", **LONG))
            until(lambda: engine.stats()["requests_waiting"] == 2)
            with served.connect() as idle:
                idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b'"ok"}'):
                    answer += idle.recv(1000)
                served.stop()
                assert to_the_end(idle) == b""
            said = to_the_end(streamed)
            event = json.loads(said.partition(b"data: ")[2].partition(b"\n\n")[0].splitlines()[0])
            assert event["error"]["code"] == "engine_closed"
            assert said.endswith(b"0\r\n\r\n")  # whole, as HTTP has it
            answer = to_the_end(whole)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in answer.lower()
            with pytest.raises(OSError, match="refused"):
                served.connect()


def test_those_who_do_not_take_their_answer_are_dropped_at_the_end() -> None:
    for served in serve(engine_of(tiny_model()), shutdown_seconds_max=0.2):
        with served.connect() as raw:
            raw.sendall(post_of("/v1/completions", **LONG)[:-3])
            assert served.call("GET", "/health")[0] == 200
            begun = time.monotonic()
            served.stop()
            with suppress(ConnectionResetError):
                assert raw.recv(1000) == b""
            assert time.monotonic() - begun < 4.0  # far less than the seconds of a request


def test_an_engine_that_hangs_is_left_alone() -> None:
    engine = engine_of(tiny_model()).start()
    with held(engine):
        assert not engine.close(0.1)
    assert engine.close(40.0)
