"""The sections host, nvme and scrub of the configuration, and lists of directories."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvtier import config
from kvtier.config import (
    CodecName,
    Config,
    DirectIo,
    HostPolicyName,
    NvmeConfig,
    PolicyName,
    ScrubConfig,
    WritePolicy,
    storage,
)
from kvtier.config.docs import default_toml, effective_toml, reference_markdown
from kvtier.config.load import load
from kvtier.errors import InvalidConfigValue


def from_file(tmp_path: Path, text: str):
    file = tmp_path / "kvtier.toml"
    file.write_text(text, encoding="utf-8")
    return load(file=file, environ={})


def test_the_storage_sections_from_a_file(tmp_path):
    text = """
[host]
policy = "s3-fifo"
[nvme]
paths = ["/mnt/b", "/mnt/a"]
bytes = "2TiB"
write_policy = "selective"
codec = "fp8"
policy = "arc"
clean_percent = 0
write_bytes_per_day = "1.5 TB"
direct_io = "required"
io_threads = 8
queue_pages_max = 77
io_timeout_ms = 250
pages_max = 5000
retry_s = 0.5
checkpoint_s = 30
sync_s = 1
[scrub]
interval_s = 0
bytes_per_second = "64KiB"
"""
    parsed = from_file(tmp_path, text).config
    assert parsed.host.policy is HostPolicyName.S3_FIFO
    assert parsed.nvme == NvmeConfig(
        paths=(Path("/mnt/b"), Path("/mnt/a")),
        bytes=2 << 40,
        write_policy=WritePolicy.SELECTIVE,
        codec=CodecName.FP8,
        policy=PolicyName.ARC,
        clean_percent=0,
        write_bytes_per_day=1_500_000_000_000,
        direct_io=DirectIo.REQUIRED,
        io_threads=8,
        queue_pages_max=77,
        io_timeout_ms=250,
        pages_max=5000,
        retry_s=0.5,
        checkpoint_s=30.0,
        sync_s=1.0,
    )
    assert parsed.scrub == ScrubConfig(interval_s=0.0, bytes_per_second=65_536)


def test_without_paths_there_is_no_nvme_tier():
    assert Config().nvme.paths == ()
    assert Config().nvme.policy is PolicyName.LRU
    assert Config().host.policy is HostPolicyName.LRU


def test_every_name_can_be_imported_from_one_module():
    assert set(storage.__all__) < set(config.__all__)
    for name in storage.__all__:
        assert getattr(config, name) is getattr(storage, name)


def test_the_modules_import_in_one_direction():
    order = ["kinds", "fields", "storage", "local", "tree", "load", "docs"]
    for at, name in enumerate(order):
        text = Path(config.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        imported = [later for later in order[at:] if f"from kvtier.config.{later} import" in text]
        assert imported == [], name


def test_the_sections_of_the_storage_stand_in_every_text():
    shown = effective_toml(load(environ={}))
    for text in (default_toml(), shown, reference_markdown()):
        for section in ("nvme", "scrub"):
            assert f"[{section}]" in text or f"## {section}" in text
    table = tomllib.loads(default_toml())
    assert table["nvme"]["paths"] == []
    assert table["nvme"]["bytes"] == "64GiB"
    assert table["scrub"] == {"interval_s": 86400.0, "bytes_per_second": "100MiB"}


# -- lists of directories -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("[]", ()),
        ("['/mnt/a']", ("/mnt/a",)),
        ("['/mnt/b', '/mnt/a']", ("/mnt/b", "/mnt/a")),
        ("['/mnt/a,b', '/mnt/c d']", ("/mnt/a,b", "/mnt/c d")),
    ],
)
def test_lists_of_directories_in_a_file(tmp_path, text, paths):
    effective = from_file(tmp_path, f"[nvme]\npaths = {text}\n")
    assert effective.config.nvme.paths == tuple(map(Path, paths))


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("", ()),
        ("  ", ()),
        ("/mnt/a", ("/mnt/a",)),
        (" /mnt/b , /mnt/a ", ("/mnt/b", "/mnt/a")),
    ],
)
def test_lists_of_directories_as_text(text, paths):
    expected = tuple(map(Path, paths))
    assert load(environ={"KVTIER_NVME__PATHS": text}).config.nvme.paths == expected
    assert load(environ={}, overrides=[f"nvme.paths={text}"]).config.nvme.paths == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("'/mnt/a'", r"not a list \(str\)"),
        ("{}", "a table where a value belongs"),
        ("[1]", r"not a path \(int\)"),
        ("[['/mnt/a']]", r"not a path \(list\)"),
        ("['mnt/a']", "not an absolute path"),
        ("['/mnt/a', '']", "not an absolute path"),
        ("['/mnt/a', '/mnt/a']", "a path is there twice"),
        ("['/mnt/a', '/mnt/a/']", "a path is there twice"),
        ("['/mnt/a', '/mnt/b/../a']", "a path is there twice"),
        (str([f"/mnt/{n}" for n in range(17)]), "17 paths"),
    ],
)
def test_lists_of_directories_that_are_none(tmp_path, text, reason):
    allowed = r"allowed: a list of up to 16 absolute paths"
    with pytest.raises(InvalidConfigValue, match=rf"nvme\.paths = .*: {reason}; {allowed}"):
        from_file(tmp_path, f"[nvme]\npaths = {text}\n")


@pytest.mark.parametrize("text", ["/mnt/a,", ",/mnt/a", "/mnt/a,,/mnt/b", "/mnt/a,/mnt/a"])
def test_commas_that_separate_nothing(text):
    with pytest.raises(InvalidConfigValue, match=r"nvme\.paths"):
        load(environ={}, overrides=[f"nvme.paths={text}"])


def test_sixteen_directories_are_a_list(tmp_path):
    many = [f"/mnt/{n}" for n in range(16)]
    assert len(from_file(tmp_path, f"[nvme]\npaths = {many}\n").config.nvme.paths) == 16


@pytest.mark.parametrize("name", ['/mnt/"a"', "/mnt/\u00e9", "/mnt/\U0001f600", "/mnt/\x7f\t\\"])
def test_any_path_that_can_be_set_is_shown_as_toml(tmp_path, name):
    overrides = [f"nvme.paths={name},/mnt/b", f"daemon.directory={name}"]
    effective = load(environ={}, overrides=overrides)
    assert effective.config.nvme.paths == (Path(name), Path("/mnt/b"))
    assert from_file(tmp_path, effective_toml(effective)).config == effective.config


def test_a_path_that_is_no_text_is_refused():
    with pytest.raises(InvalidConfigValue, match=r"nvme\.paths = .*not UTF-8"):
        load(environ={"KVTIER_NVME__PATHS": "/mnt/\udcff"})
