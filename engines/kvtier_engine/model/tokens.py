"""Text to tokens and back: the `tokenizers` file of a model, its chat template, streamed text.

Templates come with the model and run in jinja's sandbox. No transformers. A Tokenizer may be used
from any thread, a TextStream from one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer

from kvtier_engine.errors import InvalidRequest, ModelUnusable
from kvtier_engine.guard import attempted

__all__ = ["TextStream", "Tokenizer"]

_REMEDY = "use a model directory with the tokenizer.json that its model was trained with"
#: Decoders put it where bytes are no character, or not yet.
_NO_CHARACTER = "\ufffd"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
#: As a tokenizer with byte fallback names the token of one byte.
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")
#: Tokens whose text is held back at most. A character has four bytes: more are of something else,
#: say of special tokens, or of bytes that are no character.
_HELD_TOKENS_MAX = 16


class Tokenizer:
    """Made from the content of tokenizer.json and of tokenizer_config.json."""

    def __init__(self, raw: RawTokenizer, settings: Mapping[str, Any]) -> None:
        self._raw = raw
        self._special = {name: _token_text(settings.get(name)) for name in _SPECIAL}
        self._template = _template_of(settings)

    @classmethod
    def from_text(cls, tokenizer: str, settings: Mapping[str, Any]) -> Tokenizer:
        """Raises ModelUnusable."""
        # The library raises bare Exception, and settings may be any JSON.
        made = attempted(lambda: cls(RawTokenizer.from_str(tokenizer), settings), None)
        if isinstance(made, Exception):
            raise ModelUnusable(f"the tokenizer cannot be read: {made}", remedy=_REMEDY) from made
        return made

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Raises ModelUnusable."""
        try:
            text = (directory / "tokenizer.json").read_text(encoding="utf-8")
            place = directory / "tokenizer_config.json"
            settings = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
            if not isinstance(settings, dict):
                raise ValueError(f"{place.name} holds no object")
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
        text = self._alone(token)
        return str(self._raw.id_to_token(token)) if _NO_CHARACTER in text else text

    def token_bytes(self, token: int) -> bytes | None:
        """What one token alone adds to the text, also where that is a part of a character. None
        where its name does not tell.
        """
        text = self._alone(token)
        if _NO_CHARACTER not in text:
            return text.encode()
        name = str(self._raw.id_to_token(token))
        if (match := _ONE_BYTE.fullmatch(name)) is not None:
            return bytes.fromhex(match[1])
        try:
            return bytes(_BYTES_OF_NAMES[character] for character in name)
        except KeyError:
            return None

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

    def _alone(self, token: int) -> str:
        return str(self._raw.decode([token], skip_special_tokens=False))


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
        is_full = len(self._new) >= _HELD_TOKENS_MAX
        if whole.endswith(_NO_CHARACTER) and not is_full:
            return ""
        if whole.startswith(self._told_text):
            text = whole[len(self._told_text) :]
        else:  # what was told cannot be taken back: the new tokens alone
            text = self._decoded(self._new)
        if text:
            self._told, self._new = self._new, []
            self._told_text = self._decoded(self._told)
        elif is_full:
            self._new.clear()
        return text

    def _decoded(self, ids: list[int]) -> str:
        return str(self._raw.decode(ids, skip_special_tokens=True))


def _bytes_of_names() -> dict[str, int]:
    """How byte-level tokenizers write bytes in the names of their tokens: as the characters of
    Latin-1 that are seen, the others from U+0100 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    named = {chr(byte): byte for byte in seen}
    return named | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES_OF_NAMES = _bytes_of_names()


def _template_of(settings: Mapping[str, Any]) -> Any:
    text = settings.get("chat_template")
    if isinstance(text, list):  # named ones; "default" is for plain chats
        text = {entry["name"]: entry["template"] for entry in text}.get("default")
    if not isinstance(text, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
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
