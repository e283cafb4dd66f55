"""Readers of traces: every format gives the same requests, and a malformed row is named."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.errors import TraceError
from kvtier.bench.formats import ReadOptions, TraceFormat, detect, read_trace
from kvtier.bench.trace import Paths
from tests.bench.traces import (
    build,
    conversations,
    mooncake_rows,
    same_paths,
    upwards,
    write_lines,
)

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_paths_are_those_by_parents(seed):
    trace = build(conversations(seed))
    for request, path in enumerate(Paths(trace)):
        assert path.tolist() == upwards(trace, request)


@pytest.mark.parametrize("seed", SEEDS)
def test_paths_backwards_and_without_their_order(seed):
    trace = build(conversations(seed))
    paths = Paths(trace)
    for request in reversed(range(trace.requests)):
        assert paths[request].tolist() == upwards(trace, request)


@pytest.mark.parametrize("held_max", [0, 30, 200])
@pytest.mark.parametrize("seed", SEEDS)
def test_paths_that_hold_little_are_the_same(seed, held_max):
    trace = build(conversations(seed))
    for request, path in enumerate(Paths(trace, held_max)):
        assert path.tolist() == upwards(trace, request)


def test_paths_of_many_sessions_over_the_same_blocks_hold_no_more_than_they_may():
    ids = list(range(2000))
    trace = build([(session, ids) for session in range(300)])
    assert trace.blocks_seen == 2000
    tracemalloc.start()
    try:
        paths = Paths(trace, held_max=10_000)
        for request in range(trace.requests):
            assert len(paths[request]) == 2000
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 2.4 MB if each session's were held; 5 paths of 8 KB are, and what Python has around them.
    assert 40_000 <= held < 200_000


def test_equal_ids_after_other_ids_are_other_blocks():
    trace = build([(0, [1, 2, 3]), (0, [1, 4, 3]), (0, [1, 2, 3])])
    assert trace.blocks_seen == 5
    assert upwards(trace, 0) == upwards(trace, 2)
    assert upwards(trace, 1)[0] == upwards(trace, 0)[0]


# -- formats --------------------------------------------------------------------------------------


def rows_of(kind: TraceFormat) -> list[dict]:
    requests = conversations(5)
    if kind is TraceFormat.MOONCAKE:
        return mooncake_rows(requests)
    if kind is TraceFormat.MOONCAKE_SESSIONS:
        return mooncake_rows(requests, session_id=lambda session: f"s{session}")
    rows = mooncake_rows(requests)
    last: dict[int, int] = {}
    for number, (row, (session, _)) in enumerate(zip(rows, requests, strict=True)):
        row["chat_id"], row["parent_chat_id"] = number, last.get(session, -1)
        last[session] = number
        if kind is TraceFormat.BAILIAN:
            row["timestamp"] /= 1000
            row["turn"], row["type"] = 1, "text"
    return rows


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "kind",
    [
        TraceFormat.MOONCAKE,
        TraceFormat.MOONCAKE_SESSIONS,
        TraceFormat.MOONCAKE_CHATS,
        TraceFormat.BAILIAN,
    ],
)
def test_json_lines(tmp_path, kind, packed):
    path = write_lines(tmp_path / "trace", rows_of(kind))
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    requests = conversations(5)
    trace = read_trace(path)
    assert detect(path) is kind
    assert trace.format == kind.value
    assert trace.block_tokens == 512
    assert same_paths(trace, build(requests))
    assert trace.arrival_s.tolist() == list(range(len(requests)))
    assert trace.input_tokens.tolist() == [len(ids) * 512 - 5 for _, ids in requests]
    if kind is not TraceFormat.MOONCAKE:
        assert np.array_equal(trace.session, build(requests).session)


def test_requests_are_put_in_the_order_of_arrival(tmp_path):
    rows = mooncake_rows(conversations(6))
    trace = read_trace(write_lines(tmp_path / "a", rows))
    swapped = read_trace(write_lines(tmp_path / "b", rows[::-1]))
    assert same_paths(trace, swapped)


def test_ids_may_be_text_and_times_may_be_missing(tmp_path):
    rows = mooncake_rows(conversations(7))
    texts = [{**row, "hash_ids": [f"h{i}" for i in row["hash_ids"]]} for row in rows]
    for row in texts:
        del row["timestamp"]
    trace = read_trace(write_lines(tmp_path / "texts", texts))
    assert same_paths(trace, read_trace(write_lines(tmp_path / "numbers", rows)))
    assert "no times in the file" in trace.notes[0]


def test_ids_of_two_kinds_are_refused(tmp_path):
    rows = mooncake_rows([(0, [0, 1]), (1, ["a", "b"])])
    with pytest.raises(TraceError, match=":2: hash_ids are text, and numbers in the lines before"):
        read_trace(write_lines(tmp_path / "numbers", rows))
    with pytest.raises(TraceError, match=":2: hash_ids are numbers, and text in the lines before"):
        read_trace(write_lines(tmp_path / "texts", rows[::-1]))
    with pytest.raises(TraceError, match=":1: hash_ids has an id that is no whole number"):
        read_trace(write_lines(tmp_path / "mixed", mooncake_rows([(0, [0, "a"])])))


@pytest.mark.parametrize(
    ("field", "value"),
    [("timestamp", 7), ("session_id", "s"), ("chat_id", 7), ("block_size", 512)],
)
def test_what_only_some_lines_say_is_refused(tmp_path, field, value):
    rows = mooncake_rows([(0, [1, 2]), (0, [1, 2])])
    for row in rows:
        row.pop(field, None)
    one = {**rows[1], field: value}
    with pytest.raises(TraceError, match=f":2: field '{field}', and the first line has none"):
        read_trace(write_lines(tmp_path / "later", [rows[0], one]))
    with pytest.raises(TraceError, match=f":2: no field '{field}', and the first line has"):
        read_trace(write_lines(tmp_path / "earlier", [one, rows[0]]))


def test_another_block_size_is_refused(tmp_path):
    rows = mooncake_rows([(0, [1, 2]), (0, [1, 2])], block_size=lambda _: 512)
    rows[1]["block_size"] = 16
    with pytest.raises(TraceError, match=":2: block_size is 16, and 512 in the first line"):
        read_trace(write_lines(tmp_path / "trace", rows))


@pytest.mark.parametrize("tokens", [16, 64, 256, 512])
def test_the_tokens_of_a_block_are_found_out(tmp_path, tokens):
    rows = mooncake_rows(conversations(7))
    for row in rows:
        row["input_length"] = len(row["hash_ids"]) * tokens - tokens // 2
    assert read_trace(write_lines(tmp_path / "exact", rows)).block_tokens == tokens
    rows[3]["input_length"] += tokens - 1  # some tokens that are in no block
    assert read_trace(write_lines(tmp_path / "close", rows)).block_tokens == tokens
    with pytest.raises(TraceError, match=r"close:\d+: \d+ blocks of 48 tokens do not fit"):
        read_trace(tmp_path / "close", ReadOptions(block_tokens=48))


def test_sessions_are_those_that_own_the_deepest_block():
    # The first block is everybody's; 2 goes on 0, 3 branches from 1 before its own last block.
    requests = [[9, 1, 2], [9, 3, 4], [9, 1, 2, 5], [9, 3, 6], [9, 7], [9]]
    trace = build([(0, ids) for ids in requests], with_sessions=False)
    assert trace.session.tolist() == [0, 1, 0, 1, 2, 3]
    assert trace.notes == ("sessions reconstructed: the file names none",)


# -- ragpulse -------------------------------------------------------------------------------------


def ragpulse(folder: Path) -> Path:
    for name, field, sizes in (
        ("1_sys_prompt", "sys_prompt_id", {1: 64, 2: 32}),
        ("2_passages", "passage_id", {1: 100, 2: 60}),
        ("3_history", "history_id", {7: 11}),
        ("4_user_input", "user_input_id", {9: 5}),
        ("5_web_search", "web_search_id", {}),
    ):
        rows = [{field: one, "token_length": size} for one, size in sizes.items()]
        write_lines(folder / f"ragpulse_{name}.jsonl", rows)
    rows = [
        {
            "timestamp": str(number),
            "input_length": 64 + 32 + 160 + 11 + 5 + 8,
            "output_length": 3,
            "hash_ids": {
                "sys_prompt": [1, 2],
                "passages_ids": passages,
                "history": [7],
                "web_search": [],
                "user_input": [9],
            },
            "session_id": f"s{number}",
        }
        for number, passages in enumerate([[1, 2], [2, 1], [1, 2]])
    ]
    return write_lines(folder / "ragpulse_0_trace.jsonl", rows)


def test_ragpulse_is_cut_to_blocks_of_its_components(tmp_path):
    trace = read_trace(ragpulse(tmp_path))
    assert trace.format == "ragpulse"
    first, second, third = (upwards(trace, request) for request in range(3))
    assert [len(path) for path in (first, second, third)] == [5, 5, 5]  # 280 tokens
    # The first 64 tokens are the system prompt's; the second block already has a passage.
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] + [False] * 4
    # The last block ends in the 8 tokens that are the request's own.
    assert [a == b for a, b in zip(first, third, strict=True)] == [True] * 4 + [False]


def test_ragpulse_without_its_components(tmp_path):
    path = ragpulse(tmp_path)
    (tmp_path / "ragpulse_3_history.jsonl").unlink()
    with pytest.raises(TraceError, match=r"no file \*history.jsonl beside it"):
        read_trace(path)


def test_components_of_other_fields_are_other_content(tmp_path):
    path = ragpulse(tmp_path)
    write_lines(
        tmp_path / "ragpulse_5_web_search.jsonl", [{"web_search_id": 1, "token_length": 64}]
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()][:2]
    for row, field in zip(rows, ("sys_prompt", "web_search"), strict=True):
        row["hash_ids"] = {field: [1]}
        row["input_length"] = 64
    trace = read_trace(write_lines(path, rows))
    assert upwards(trace, 0) != upwards(trace, 1)


def test_what_is_a_requests_own_is_no_component(tmp_path):
    path = ragpulse(tmp_path)
    row = json.loads(path.read_text().splitlines()[0])
    none: dict = {**row, "hash_ids": {}, "input_length": 64}
    # Whatever number the own tokens of a line get, no component of 64 tokens may be the same.
    sizes = [{"passage_id": one, "token_length": 64} for one in range(8)]
    write_lines(tmp_path / "ragpulse_2_passages.jsonl", sizes)
    rows = [none] * 4 + [{**none, "hash_ids": {"passages_ids": [one]}} for one in range(8)]
    trace = read_trace(write_lines(path, rows))
    assert trace.blocks_seen == len(rows)


@pytest.mark.parametrize(
    ("value", "what"), [(None, "session_id is None"), (True, "session_id is True")]
)
def test_ragpulse_without_a_session(tmp_path, value, what):
    path = ragpulse(tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["session_id"] = value
    with pytest.raises(TraceError, match=f":2: {what}, neither a whole number nor text"):
        read_trace(write_lines(path, rows))


def test_ragpulse_with_two_files_of_one_component(tmp_path):
    path = ragpulse(tmp_path)
    (tmp_path / "old_history.jsonl").write_text("")
    match = "several files .* beside it: old_history.jsonl, ragpulse_3_history.jsonl"
    with pytest.raises(TraceError, match=match):
        read_trace(path)


def test_ragpulse_with_two_lengths_of_one_component(tmp_path):
    path = ragpulse(tmp_path)
    rows = [{"history_id": 7, "token_length": size} for size in (11, 12)]
    write_lines(tmp_path / "ragpulse_3_history.jsonl", rows)
    with pytest.raises(
        TraceError, match=r"history\.jsonl:2: history_id 7 has 12 tokens, and had 11"
    ):
        read_trace(path)


# -- what is malformed ----------------------------------------------------------------------------

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"timestamp": 0, "input_length": 600', "no JSON"),
        ("[1, 2]", r"\[1, 2\], not a JSON object"),
        ({**GOOD, "hash_ids": [1, 2.5]}, "an id that is no whole number"),
        ({**GOOD, "hash_ids": [1, None]}, "an id that is no whole number"),
        ({**GOOD, "hash_ids": [1, True]}, "an id that is no whole number"),
        ({**GOOD, "hash_ids": [1, 1 << 64]}, "an id of more than 64 bits"),
        ({**GOOD, "timestamp": "1e99"}, "timestamp is '1e99', not a time"),
        ({**GOOD, "timestamp": 10**400}, "timestamp is 1000.*, not a time"),
        ({**GOOD, "hash_ids": 7}, "hash_ids is 7, not a list"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "3 blocks of 512 tokens do not fit input_length 600"),
        ({**GOOD, "hash_ids": []}, "0 blocks of 512 tokens do not fit input_length 600"),
        ({**GOOD, "input_length": -1}, "input_length is -1, not a whole number from 0"),
        ({**GOOD, "input_length": "600"}, "input_length is '600', not a whole number"),
        ({**GOOD, "timestamp": -1}, "timestamp is -1, not a time"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp is nan, not a time"),
        ({"timestamp": 0, "hash_ids": []}, "no field 'input_length'"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path, row, what):
    text = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n".join([json.dumps(GOOD)] * 300 + [text]) + "\n")
    with pytest.raises(TraceError, match=what) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:601: ")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"hello\n", "no JSON"),
        (b'{"a": 1}\n', "no known trace format; its fields are: a"),
        (b"\x1f\x8bnothing", "cannot be read"),
        (b'{"hash_ids": [1], "input_length": 0, "x": 1}\n\xff\xfe\n', "no JSON"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, text, what):
    path = tmp_path / "trace"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=what) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_gzip_file_cut_short(tmp_path):
    path = tmp_path / "trace.gz"
    whole = gzip.compress(write_lines(tmp_path / "t", mooncake_rows(conversations(3))).read_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r":\d+: cannot be read"):
        read_trace(path)
