"""The server with the real `openai` client, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.engine_rig import engine_of, tiny_model
from tests.engine.server_rig import Served, serve

MESSAGES = [{"role": "user", "content": "tell me about pages"}]


@pytest.fixture
def served() -> Iterator[Served]:
    yield from serve(engine_of(tiny_model(), queue_requests_max=1, running_requests_max=1))


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai")


@pytest.fixture
def client(openai: Any, served: Served) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def test_chat_whole_and_streamed(client: Any) -> None:
    words = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**words)
    stream = client.chat.completions.create(
        **words, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_completions_logprobs_and_models(client: Any) -> None:
    done = client.completions.create(
        model="tiny", prompt="abc", max_tokens=4, logprobs=1, extra_body={"ignore_eos": True}
    )
    assert len(done.choices[0].logprobs.tokens) == done.usage.completion_tokens == 4
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_errors_are_the_classes_that_clients_expect(
    client: Any, openai: Any, served: Served
) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.NotFoundError, match="no model 'nope'; ask for 'tiny'") as absent:
        client.models.retrieve("nope")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="a list of 2 prompts"):
        client.completions.create(model="tiny", prompt=["a", "b"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="tiny", prompt="a" * (9 << 20))
    assert (large.value.status_code, large.value.code) == (413, "request_too_large")
    served.engine.close()
    with pytest.raises(openai.InternalServerError, match="the engine is closed"):
        client.completions.create(model="tiny", prompt="a")
