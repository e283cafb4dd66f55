"""Reads the configuration from its sources; `kvtier.config` has the rules."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from kvtier.config.kinds import parse_listen
from kvtier.config.tree import Config, Setting, settings
from kvtier.errors import ConfigError, InvalidConfigValue, UnknownConfigKey
from kvtier.streams import read_bytes

__all__ = ["CONFIG_VARIABLE", "CRASH_VARIABLE", "DEFAULT_SOURCE", "Effective", "load", "problems"]

#: Names the file when no `--config` is given.
CONFIG_VARIABLE = "KVTIER_CONFIG"
#: Where the daemon is to die, for tests (tiers/crash_points.py).
CRASH_VARIABLE = "KVTIER_CRASH_POINT"
DEFAULT_SOURCE = "default"
#: Variables with our prefix that are no settings of the daemon: the file, and what the benchmarks
#: and tests are told.
_OF_OTHERS = frozenset(
    (CONFIG_VARIABLE, CRASH_VARIABLE, "KVTIER_FIO", "KVTIER_SIM_SEEDS", "KVTIER_TRACES")
)

#: Of a configuration file; and how long its other end may be silent where it is a pipe.
_FILE_BYTES_MAX: Final = 1 << 20
_FILE_SILENCE_S: Final = 5.0

_PREFIX = "KVTIER_"
_LINE = re.compile(r"\(at line (\d+)")
# A Kubernetes Service called "kvtier" puts these into every pod of its namespace.
_KUBERNETES = re.compile(
    r"KVTIER_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """The configuration in force and, by key name, which source set each value."""

    config: Config
    sources: Mapping[str, str]

    def value(self, name: str) -> Any:
        section, key = name.split(".")
        return getattr(getattr(self.config, section), key)

    def invalid(self, name: str, reason: str, *, remedy: str) -> InvalidConfigValue:
        """For a value that proves impossible only in use: an address that is taken, say."""
        text = settings()[name].kind.to_toml(self.value(name))
        return InvalidConfigValue(
            f"{name} = {text} ({self.sources[name]}): {reason}", remedy=remedy
        )


@dataclass(slots=True)
class _Found:
    values: dict[str, Any]
    sources: dict[str, str]
    problems: list[ConfigError] = field(default_factory=list)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes an error and goes on behind it."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(error)


def load(
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    overrides: Sequence[str] = (),
) -> Effective:
    """Parse all sources. `overrides` are "section.key=value" texts.

    Raises UnknownConfigKey or InvalidConfigValue; both name key, source and what would be right.
    """
    effective, found = _read_all(file, environ, overrides)
    if found:
        raise found[0]
    return effective


def problems(file: Path) -> list[ConfigError]:
    """Everything that is wrong in a file alone, in its order."""
    return _read_all(file, {}, ())[1]


def _read_all(
    file: Path | None, environ: Mapping[str, str], overrides: Sequence[str]
) -> tuple[Effective, list[ConfigError]]:
    known = settings()
    found = _Found(
        values={name: setting.default for name, setting in known.items()},
        sources=dict.fromkeys(known, DEFAULT_SOURCE),
    )
    path = file
    if path is None and environ.get(CONFIG_VARIABLE):
        path = Path(environ[CONFIG_VARIABLE])
    if path is not None:
        with found.noting():
            _read_file(path, known, found)
    _read_environment(environ, known, found)
    _read_overrides(overrides, known, found)
    effective = Effective(config=_build(found.values), sources=found.sources)
    if not found.problems:
        with found.noting():
            _check_together(effective)
    return effective, found.problems


def _build(values: Mapping[str, Any]) -> Config:
    default = Config()
    sections = {}
    for section in fields(Config):
        kind = type(getattr(default, section.name))
        sections[section.name] = kind(
            **{item.name: values[f"{section.name}.{item.name}"] for item in fields(kind)}
        )
    return Config(**sections)


def _read_file(path: Path, known: Mapping[str, Setting], found: _Found) -> None:
    source = f"file {path}"
    for section, table in _parsed(path, source).items():
        with found.noting():
            _check_section(section, table, source, known)
            for key, raw in table.items():
                with found.noting():
                    name = f"{section}.{key}"
                    setting = known.get(name)
                    if setting is None:
                        raise _unknown(name, source, known)
                    if isinstance(raw, dict):
                        raise _invalid(setting, repr(raw), source, "a table where a value belongs")
                    _take(setting, raw, source=source, parse=setting.kind.parse, found=found)


def _parsed(path: Path, source: str) -> dict[str, Any]:
    try:
        text = read_bytes(path, bytes_max=_FILE_BYTES_MAX, silence_s=_FILE_SILENCE_S).decode()
    except OSError as error:
        raise InvalidConfigValue(
            f"{source} cannot be read: {error.strerror}", remedy="Name a readable TOML file."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidConfigValue(
            f"{source} is not UTF-8 text: {error.reason} at byte {error.start}",
            remedy="Save the file as UTF-8.",
        ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfigValue(
            f"{source}: {_explain_toml(text, str(error))}",
            remedy="Correct the file; `kvtier config default` prints a valid one.",
        ) from error


def _check_section(section: str, table: object, source: str, known: Mapping[str, Setting]) -> None:
    """Raises UnknownConfigKey or InvalidConfigValue. The keys of an unknown section are unknown,
    each by itself.
    """
    is_known = section in {item.name for item in fields(Config)}
    is_table = isinstance(table, dict)
    if not is_known and not (is_table and table):
        raise _unknown_section(section, table, source, known)
    if not is_table:
        raise InvalidConfigValue(
            f"{section} = {table!r} ({source}): {section} is a section, not a value",
            remedy=f"Write [{section}] and the keys below it.",
        )


def _read_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], found: _Found
) -> None:
    by_variable = {setting.variable: setting for setting in known.values()}
    in_kubernetes = re.match(r"(tcp|udp|sctp)://", environ.get("KVTIER_PORT", "")) is not None
    for variable in sorted(environ):
        if not variable.upper().startswith(_PREFIX) or variable in _OF_OTHERS:
            continue
        if in_kubernetes and _KUBERNETES.fullmatch(variable):
            continue
        with found.noting():
            setting = by_variable.get(variable)
            if setting is None:
                near = _nearest(variable.upper(), [*by_variable, CONFIG_VARIABLE])
                raise UnknownConfigKey(
                    f"unknown key {variable} (environment); the nearest known one is {near}",
                    remedy=f"Use {near}, or remove {variable} from the environment.",
                )
            source = f"environment {variable}"
            text = environ[variable]
            _take(setting, text, source=source, parse=setting.kind.parse_text, found=found)


def _read_overrides(overrides: Sequence[str], known: Mapping[str, Setting], found: _Found) -> None:
    seen: dict[str, str] = {}
    for override in overrides:
        with found.noting():
            _read_override(override, seen, known, found)


def _read_override(
    override: str, seen: dict[str, str], known: Mapping[str, Setting], found: _Found
) -> None:
    name, equals, text = override.partition("=")
    name = name.strip()
    if not name:
        raise InvalidConfigValue(
            f"--set {override!r} names no key",
            remedy="Write --set KEY=VALUE; `kvtier config default` lists every key.",
        )
    setting = known.get(name)
    if setting is None:
        raise _unknown(name, "--set", known)
    if not equals:
        raise _invalid(setting, "", "--set", "no value")
    if name in seen:
        raise _invalid(setting, text, "--set", f"given twice, first as {seen[name]!r}")
    seen[name] = text
    source = f"--set {name}"
    _take(setting, text, source=source, parse=setting.kind.parse_text, found=found)


def _take(
    setting: Setting,
    raw: object,
    *,
    source: str,
    parse: Callable[[Any], Any],
    found: _Found,
) -> None:
    try:
        value = parse(raw)
    except ValueError as error:
        raise _invalid(setting, repr(raw), source, str(error)) from error
    found.values[setting.name] = value
    found.sources[setting.name] = source


def _check_together(effective: Effective) -> None:
    """Rules between keys; the error names both, with their sources."""
    for small, large in (
        ("limits.lease_ms_default", "limits.lease_ms_max"),
        ("limits.bytes_per_call_max", "limits.bytes_under_way_max"),
    ):
        if effective.value(small) > effective.value(large):
            raise _conflict(effective, small, f"at most {large}", large)
    # A message carries a chunk and up to 64 KiB of page announcements.
    if effective.value("limits.chunk_bytes") + 65_536 > effective.value("limits.message_bytes_max"):
        raise _conflict(
            effective,
            "limits.chunk_bytes",
            "64 KiB less than limits.message_bytes_max",
            "limits.message_bytes_max",
        )
    paths = [parse_listen(text).path for text in effective.config.daemon.listen]
    named = [path for path in paths if path is not None]
    if len(set(named)) != len(named):
        raise effective.invalid(
            "daemon.listen", "a socket path is there twice", remedy="Name each socket once."
        )


def _conflict(effective: Effective, name: str, rule: str, other: str) -> InvalidConfigValue:
    known = settings()
    other_text = known[other].kind.to_toml(effective.value(other))
    return effective.invalid(
        name,
        f"must be {rule}, which is {other_text} ({effective.sources[other]})",
        remedy=f"Change {name} or {other}.",
    )


def _invalid(setting: Setting, value: str, source: str, reason: str) -> InvalidConfigValue:
    return InvalidConfigValue(
        f"{setting.name} = {value} ({source}): {reason}; allowed: {setting.kind.allowed}",
        remedy=f"Set {setting.name} to {setting.kind.allowed}.",
    )


def _unknown(name: str, source: str, known: Mapping[str, Setting]) -> UnknownConfigKey:
    near = _nearest(name, list(known))
    return UnknownConfigKey(
        f"unknown key {name} ({source}); the nearest known one is {near}",
        remedy=f"Use {near}, or remove {name}. `kvtier config default` lists every key.",
    )


def _unknown_section(
    section: str, table: object, source: str, known: Mapping[str, Setting]
) -> UnknownConfigKey:
    if not isinstance(table, dict):
        inside = [name for name in known if name.endswith(f".{section}")]
        if inside:
            return UnknownConfigKey(
                f"unknown key {section} ({source}); the nearest known one is {inside[0]}",
                remedy=f"Write {section} below [{inside[0].split('.')[0]}].",
            )
        return _unknown(section, source, known)
    near = _nearest(section, [item.name for item in fields(Config)])
    return UnknownConfigKey(
        f"unknown section [{section}] ({source}); the nearest known one is [{near}]",
        remedy=f"Use [{near}], or remove [{section}].",
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _explain_toml(text: str, message: str) -> str:
    """tomllib names the line alone; name what stands on it too, a duplicate key above all."""
    match = _LINE.search(message)
    lines = text.splitlines()
    if match is None or not 0 < int(match.group(1)) <= len(lines):
        return message
    number = int(match.group(1))
    line = lines[number - 1].strip()
    if "Cannot overwrite" in message or "Cannot declare" in message:
        return f"duplicate key in line {number}: {line[:100]}"
    return f"{message}: {line[:100]}"
