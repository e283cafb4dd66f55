"""The configuration for people: a commented TOML file, the reference page, and what is in force."""

from __future__ import annotations

import textwrap

from kvtier.config.load import DEFAULT_SOURCE, Effective
from kvtier.config.tree import Setting, settings

__all__ = ["default_toml", "effective_table", "effective_toml", "reference_markdown"]


def default_toml() -> str:
    """A whole configuration file: every key with its meaning, range and default."""
    lines = [
        "# kvtier configuration. Every key is optional; the values below are the defaults.",
        "# Each can also be set in the environment (KVTIER_HOST__BYTES=4GiB), or on a command line",
        "# (--set host.bytes=4GiB).",
    ]
    section = ""
    for setting in settings().values():
        head, key = setting.name.split(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"]
        lines.append("")
        lines += [f"# {line}" for line in textwrap.wrap(setting.meaning, 96)]
        lines += [f"# Allowed: {line}" for line in textwrap.wrap(_allowed(setting), 96)]
        lines.append(f"{key} = {setting.kind.to_toml(setting.default)}")
    return "\n".join(lines) + "\n"


def effective_toml(effective: Effective) -> str:
    """The values in force, each with its source as a comment."""
    lines: list[str] = []
    section = ""
    for setting in settings().values():
        head, key = setting.name.split(".")
        if head != section:
            section = head
            lines += [""] * bool(lines) + [f"[{section}]"]
        value = setting.kind.to_toml(effective.value(setting.name))
        lines.append(f"{key} = {value}  # {effective.sources[setting.name]}")
    return "\n".join(lines) + "\n"


def effective_table(effective: Effective) -> dict[str, dict[str, str]]:
    """The same for programs: name -> value (as TOML writes it) and source."""
    return {
        setting.name: {
            "value": setting.kind.to_toml(effective.value(setting.name)),
            "source": effective.sources.get(setting.name, DEFAULT_SOURCE),
        }
        for setting in settings().values()
    }


def reference_markdown() -> str:
    """docs/config.md. The same for every user: says how a default is found, not what it is here."""
    lines = [
        "# Configuration",
        "",
        "Made by `kvtier config --markdown`; do not edit. Later sources win: the defaults, the",
        "file of `--config` (or `KVTIER_CONFIG`), the environment, `--set`. An unknown key, or a",
        "value outside its range, stops the start.",
        "",
    ]
    section = ""
    for setting in settings().values():
        head, _key = setting.name.split(".")
        if head != section:
            section = head
            lines += [
                f"## {section}",
                "",
                "| key | default | allowed | meaning | variable |",
                "|---|---|---|---|---|",
            ]
        cells = (
            f"`{setting.name}`",
            f"`{setting.default_text}`",
            _allowed(setting),
            setting.meaning,
            f"`{setting.variable}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if _is_last(setting):
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _allowed(setting: Setting) -> str:
    unit = setting.kind.unit
    allowed = setting.kind.allowed
    return f"{allowed} ({unit})" if unit and unit not in allowed else allowed


def _is_last(setting: Setting) -> bool:
    names = list(settings())
    at = names.index(setting.name)
    return at + 1 == len(names) or names[at + 1].split(".")[0] != setting.name.split(".")[0]
