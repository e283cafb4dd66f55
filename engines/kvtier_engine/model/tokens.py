"""Text to tokens and back: the `tokenizers` file of a model, its chat template, streamed text.

Templates come with the model and run in jinja's sandbox. No transformers. A Tokenizer may be used
from any thread, a TextStream from one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer

from kvtier_engine.errors import InvalidRequest, ModelUnusable

__all__ = ["TextStream", "Tokenizer"]

_REMEDY = "use a model directory with the tokenizer.json that its model was trained with"
#: Decoders put it where bytes are no character, or not yet.
_NO_CHARACTER = "\ufffd"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Made from the content of tokenizer.json and of tokenizer_config.json."""

    def __init__(self, raw: RawTokenizer, settings: Mapping[str, Any]) -> None:
        self._raw = raw
        self._special = {name: _token_text(settings.get(name)) for name in _SPECIAL}
        self._template = _template_of(settings)

    @classmethod
    def from_text(cls, tokenizer: str, settings: Mapping[str, Any]) -> Tokenizer:
        """Raises ModelUnusable."""
        try:
            # The library raises bare Exception for a file that it cannot read, so JSON is first.
            json.loads(tokenizer)
            return cls(RawTokenizer.from_str(tokenizer), settings)
        except (ValueError, TemplateError) as error:
            raise ModelUnusable(f"the tokenizer cannot be read: {error}", remedy=_REMEDY) from error

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Raises ModelUnusable."""
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            place = directory / "tokenizer_config.json"
            settings = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
            template = directory / "chat_template.jinja"
            if template.is_file():
                settings["chat_template"] = template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelUnusable(f"{directory}: {error}", remedy=_REMEDY) from error
        return cls.from_text(text, settings)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model wants around a plain text (say its <s>)."""
        ids: list[int] = self._raw.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones."""
        return str(self._raw.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """One token alone: special ones, and parts of a character, by their name."""
        text = str(self._raw.decode([token], skip_special_tokens=False))
        return str(self._raw.id_to_token(token)) if "\ufffd" in text else text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation whose next turn is the model's. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template", remedy="send a plain prompt instead of messages"
            )
        try:
            rendered = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {error}",
                remedy="send messages with a role and a text content, in an order it knows",
            ) from error
        return str(rendered)

    def stream(self) -> TextStream:
        return TextStream(self._raw)


class TextStream:
    """Tokens in, text out as soon as it is whole characters.

    A token's text depends on the one before (say a space at the beginning), so what was told last
    is decoded again with what is new. Of `tokenizers` DecodeStream does the same, but raises when
    the old text comes out another way, which bytes that are no characters lead to.
    """

    def __init__(self, raw: RawTokenizer) -> None:
        self._raw = raw
        self._told: list[int] = []
        self._told_text = ""
        self._new: list[int] = []

    def add(self, token: int) -> str:
        """The text that this token completes, often "" in the middle of a character."""
        self._new.append(token)
        whole = self._decoded(self._told + self._new)
        if whole.endswith(_NO_CHARACTER):
            return ""
        if whole.startswith(self._told_text):
            text = whole[len(self._told_text) :]
        else:  # what was told cannot be taken back: the new tokens alone
            text = self._decoded(self._new)
        if text:
            self._told, self._new = self._new, []
            self._told_text = self._decoded(self._told)
        return text

    def _decoded(self, ids: list[int]) -> str:
        return str(self._raw.decode(ids, skip_special_tokens=True))


def _template_of(settings: Mapping[str, Any]) -> Any:
    text = settings.get("chat_template")
    if isinstance(text, list):  # named ones; "default" is for plain chats
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if not isinstance(text, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment.from_string(text)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _token_text(token: object) -> str:
    """Some files write a special token as an object with its settings."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
