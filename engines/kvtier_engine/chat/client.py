"""One server of OpenAI's API, as a chat needs it: its model, and answers piece by piece.

Promise: whatever the server does or fails to do is one error of `errors.py`, with what to do. By
the standard library alone. One thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvtier_engine.chat.deadline import Deadline, response_within
from kvtier_engine.chat.errors import (
    KeyInvalid,
    ServerAbsent,
    ServerRefused,
    ServerSilent,
    ServerUnreadable,
    UrlInvalid,
)
from kvtier_engine.chat.harmless import line as text_line

__all__ = ["Answer", "Asking", "ChatServer"]

#: A line of a stream, or a whole answer. Longer ones are none.
_READ_BYTES_MAX = 1 << 20
_DATA = b"data:"
_DONE = b"[DONE]"
_DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How answers are asked for. `user` names the conversation."""

    model: str
    temperature: float
    max_tokens: int
    user: str

    def body(self, messages: Sequence[Mapping[str, str]]) -> bytes:
        return json.dumps(
            {
                "model": self.model,
                "messages": list(messages),
                "temperature": self.temperature,
                "max_tokens": self.max_tokens,
                "user": self.user,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


@dataclass(slots=True)
class Answer:
    """What is known when the pieces of an answer have come. `reason` is OpenAI's finish_reason."""

    reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


class ChatServer:
    """At `url`, say http://127.0.0.1:8000, with or without /v1. `key` is sent with every request.
    A first token is waited for for `silence_seconds_max`, and each other one after it.

    Raises UrlInvalid, KeyInvalid.
    """

    def __init__(
        self, url: str, *, connect_seconds_max: float, silence_seconds_max: float, key: str = ""
    ) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname or "", parts.port
            host.encode("idna")
            parts.path.encode("ascii")
        except ValueError as error:
            raise _no_url(url, str(error)) from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.username:
            raise _no_url(url, "no plain http or https address")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            self._kind = http.client.HTTPSConnection
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._connect_seconds_max = connect_seconds_max
        self._silence_seconds_max = silence_seconds_max
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        if not key.isascii() or not key.isprintable():
            raise KeyInvalid("the key has characters that no key has", remedy="pass it as it is")

    def model(self) -> str:
        """The first of the server's models."""
        with self._asked("GET", "/v1/models", None, self._deadline()) as response:
            read = self._object(_whole(response))
        match read:
            case {"data": [{"id": str(name)}, *_]}:
                return name
        raise self._unreadable("its list of models is none")

    def answer(
        self, asking: Asking, messages: Sequence[Mapping[str, str]], told: Answer
    ) -> Generator[str, None, None]:
        """The pieces of one answer, as they come; what is known at the end goes into `told`.
        Whoever stops before the end closes the generator: the server gives the answer up then.
        """
        deadline, body = self._deadline(), asking.body(messages)
        with self._asked("POST", "/v1/chat/completions", body, deadline) as response:
            while True:
                line = response.readline(_READ_BYTES_MAX)
                if not line.endswith(b"\n"):
                    raise self._unreadable("it ended in the middle of the answer")
                if not line.startswith(_DATA):
                    continue
                if (data := line[len(_DATA) :].strip()) == _DONE:
                    return
                event = self._object(data)
                yield from self._piece(event, told)
                if _is_said(event):
                    deadline.begin()

    def _piece(self, event: Mapping[str, Any], told: Answer) -> Iterator[str]:
        if event.get("error") is not None:
            raise self._refused(event)
        if isinstance(usage := event.get("usage"), dict):
            told.usage = usage
        match event.get("choices"):
            case [{"delta": dict(delta)} as choice, *_]:
                told.reason = str(choice.get("finish_reason") or "")
                if isinstance(text := delta.get("content"), str) and text:
                    yield text

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: bytes | None, deadline: Deadline
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=self._connect_seconds_max)
        with contextlib.closing(connection), self._errors():
            self._connect(connection)
            connection.response_class = response_within(deadline)
            headers = self._headers | ({"content-type": "application/json"} if body else {})
            connection.request(method, self._path + path, body, headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    raise self._refused(_said(response), response.status, response.reason)
                yield response

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except OSError as error:
            raise ServerAbsent(
                f"no server at {self.url}: {error.strerror or error}", remedy=self._how_to_start()
            ) from error
        assert isinstance(connection.sock, socket.socket), "connected"
        connection.sock.settimeout(self._silence_seconds_max)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ServerSilent(
                f"{self.url} says nothing of an answer for {self._silence_seconds_max:g} s",
                remedy="see whether it is busy or stopped (its /health), or pass a longer"
                " --timeout",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreadable(str(error) or type(error).__name__) from error

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            read = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._unreadable("no JSON came") from error
        if not isinstance(read, dict):
            raise self._unreadable("no JSON object came")
        return read

    def _deadline(self) -> Deadline:
        return Deadline(self._silence_seconds_max)

    def _refused(
        self, read: Mapping[str, Any], status: int = 200, reason: str = ""
    ) -> ServerRefused:
        error = read.get("error")
        details = error if isinstance(error, dict) else {}
        said = details.get("message") or (error if isinstance(error, str) else "")
        said = str(said) or f"status {status} {reason}".strip()
        remedy = "see the log of the server"
        if details.get("code") == "context_length_exceeded":
            remedy = "say /reset to begin anew, or ask for fewer tokens (--max-tokens)"
        elif details.get("code") == "model_not_found":
            remedy = "leave --model out to take the one that is there"
        elif status in (401, 403):
            remedy = "pass the key of that server: --api-key, or OPENAI_API_KEY with --url"
        elif 300 <= status < 400:
            remedy = "pass the --url of the server itself: this one sends elsewhere"
        elif status in (429, 503):
            remedy = "try again in a moment"
        return ServerRefused(f"{self.url} answers: {text_line(said)}", remedy=remedy)

    def _unreadable(self, why: str) -> ServerUnreadable:
        return ServerUnreadable(
            f"no answer of OpenAI's API from {self.url}: {text_line(why)}",
            remedy="see whether that server runs still, and is one (kvtier engine)",
        )

    def _how_to_start(self) -> str:
        port = "" if self._port in (None, _DEFAULT_PORT) else f" --port {self._port}"
        return f"start one with: kvtier engine{port}"


def _whole(response: http.client.HTTPResponse) -> bytes:
    return response.read(_READ_BYTES_MAX)


def _is_said(event: Mapping[str, Any]) -> bool:
    """Something of an answer, if only of a part that is not shown, and no sign of life alone."""
    match event.get("choices"):
        case [{"delta": dict(delta)}, *_]:
            return any(value for name, value in delta.items() if name != "role")
    return False


def _said(response: http.client.HTTPResponse) -> dict[str, Any]:
    """Of an error; empty where it is not said in JSON, as by a proxy."""
    try:
        read = json.loads(_whole(response))
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _no_url(url: str, why: str) -> UrlInvalid:
    return UrlInvalid(f"--url {url}: {why}", remedy="pass one like http://127.0.0.1:8000")
