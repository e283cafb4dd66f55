"""Questions and tool calls from JSON lines, and whether an answer is right.

Questions have one of two shapes, told apart line by line:

    MMLU  {"question": "..", "choices": ["..", ".."], "answer": 1}      or "answer": "B"
    ARC   {"question": {"stem": "..", "choices": [{"label": "A", "text": ".."}, ..]},
           "answerKey": "B"}            also flat: "choices": {"text": [..], "label": [..]}

A tool task is {"prompt": "..", "tools": [{"name": "..", "parameters": <JSON schema>}, ..]}, with
the tools also as OpenAI has them ({"type": "function", "function": {..}}). Its answer is valid if
the first JSON object in it calls one of the tools with all required arguments, none unknown, each
of the type that the schema names.

Pure functions; reading raises TaskInvalid with file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from kvtier_engine.errors import TaskInvalid

__all__ = ["Question", "ToolTask", "is_valid_call", "read_questions", "read_tool_tasks"]

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_SHAPES: Final = "see `kvtier bench fidelity --help` for the shapes of a line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`answer` is the number of the right choice."""

    text: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """`tools`: JSON schemas of the parameters, by the name of the tool."""

    prompt: str
    tools: Mapping[str, Mapping[str, Any]]


def read_questions(place: Path) -> list[Question]:
    """Raises TaskInvalid; OSError for a file that cannot be read."""
    return [_question(line, where) for line, where in _lines(place)]


def read_tool_tasks(place: Path) -> list[ToolTask]:
    """Raises TaskInvalid; OSError for a file that cannot be read."""
    return [_tool_task(line, where) for line, where in _lines(place)]


def is_valid_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the first JSON object in `text` is a call of one of these tools."""
    call = _first_object(text)
    if call is None:
        return False
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in tools:
        return False
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI writes them as a text
        arguments = _first_object(arguments)
    schema = tools[name]
    properties = schema.get("properties", {})
    if not isinstance(arguments, dict) or not set(arguments) <= set(properties):
        return False
    if not set(schema.get("required", ())) <= set(arguments):
        return False
    return all(_fits(value, properties[key]) for key, value in arguments.items())


def _is_schema(schema: object) -> TypeGuard[dict[str, Any]]:
    """As far as `is_valid_call` looks at one."""
    if not isinstance(schema, dict):
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
    )


def _fits(value: object, schema: object) -> bool:
    wanted = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(wanted, str) or wanted not in _TYPES:
        return True
    if isinstance(value, bool) and wanted != "boolean":
        return False
    return isinstance(value, _TYPES[wanted])


def _first_object(text: str) -> dict[str, Any] | None:
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            found, _ = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
            continue
        return found if isinstance(found, dict) else None
    return None


def _lines(place: Path) -> Iterator[tuple[dict[str, Any], str]]:
    found = False
    with place.open(encoding="utf-8") as opened:
        for number, line in enumerate(opened, 1):
            where = f"{place}, line {number}"
            if not line.strip():
                continue
            try:
                read = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TaskInvalid(f"{where}: no JSON ({error})", remedy=_SHAPES) from error
            if not isinstance(read, dict):
                raise TaskInvalid(f"{where}: no object", remedy=_SHAPES)
            found = True
            yield read, where
    if not found:
        raise TaskInvalid(f"{place} is empty", remedy=_SHAPES)


def _question(line: dict[str, Any], where: str) -> Question:
    asked = line.get("question")
    inner = asked if isinstance(asked, dict) else line
    text = inner.get("stem", asked) if isinstance(asked, dict) else asked
    labels, choices = _choices(inner.get("choices"))
    answer = line.get("answerKey", line.get("answer"))
    if isinstance(answer, str) and answer in labels:
        answer = labels.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise TaskInvalid(f"{where}: no answer among the choices", remedy=_SHAPES)
    if not isinstance(text, str) or len(choices) < 2 or not all(choices):
        raise TaskInvalid(f"{where}: no question with choices", remedy=_SHAPES)
    if not 0 <= answer < len(choices):
        raise TaskInvalid(f"{where}: answer {answer} of {len(choices)} choices", remedy=_SHAPES)
    return Question(text=text, choices=tuple(choices), answer=answer)


def _choices(given: object) -> tuple[list[str], list[str]]:
    """(labels, texts); empty where they cannot be read."""
    if isinstance(given, dict):
        labels, texts = given.get("label"), given.get("text")
        given = (
            [{"label": a, "text": b} for a, b in zip(labels, texts, strict=False)]
            if isinstance(labels, list) and isinstance(texts, list)
            else None
        )
    if not isinstance(given, list):
        return [], []
    if all(isinstance(choice, str) for choice in given):
        return [chr(ord("A") + at) for at in range(len(given))], given
    if not all(isinstance(choice, dict) and "text" in choice for choice in given):
        return [], []
    return [str(c.get("label", "")) for c in given], [str(c["text"]) for c in given]


def _tool_task(line: dict[str, Any], where: str) -> ToolTask:
    prompt, tools = line.get("prompt"), line.get("tools")
    named: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        schema = function.get("parameters", {}) if isinstance(function, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not _is_schema(schema):
            raise TaskInvalid(f"{where}: a tool without a name or schema", remedy=_SHAPES)
        named[name] = schema
    if not isinstance(prompt, str) or not named:
        raise TaskInvalid(f"{where}: no prompt with tools", remedy=_SHAPES)
    return ToolTask(prompt=prompt, tools=named)
