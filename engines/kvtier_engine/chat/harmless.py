"""Texts from outside, made so that they can be shown and sent. Pure functions; any thread."""

from __future__ import annotations

import unicodedata

__all__ = ["harmless", "line", "whole"]

#: Controls (a terminal obeys them), and halves of pairs (no output can encode them).
_BANNED = frozenset({"Cc", "Cs"})
#: They turn text around, so that it reads as another.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_LINE_CHARACTERS_MAX = 1000


def harmless(text: str) -> str:
    """Without what a terminal would obey, but for newlines and tabs."""
    return "".join(one if one in "\n\t" or _is_harmless(one) else "\ufffd" for one in text)


def line(text: str) -> str:
    """The beginning of a text, harmless and on one line."""
    return harmless(" ".join(text[:_LINE_CHARACTERS_MAX].split()))


def whole(text: str) -> str:
    """With pairs of surrogates as the characters that they are, and halves replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _is_harmless(one: str) -> bool:
    return one not in _BIDI and unicodedata.category(one) not in _BANNED
