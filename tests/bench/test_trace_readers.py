"""Readers of traces: every format gives the same requests, and a malformed row is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.arrivals import Arrivals
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


# -- agent traces ---------------------------------------------------------------------------------


def weka_session(
    requests: list[list[int]], *, scope: str, nested: tuple[int, ...] = ()
) -> dict[str, object]:
    entries: list[dict] = []
    for number, ids in enumerate(requests):
        entry = {"t": 2.0 * number, "type": "n", "in": len(ids) * 64, "out": 5, "hash_ids": ids}
        if number in nested:
            entry = {"t": 2.0 * number, "type": "subagent", "requests": [entry]}
        entries.append(entry)
    return {"id": "x", "block_size": 64, "hash_id_scope": scope, "requests": entries}


def weka_lists(seed: int) -> list[list[list[int]]]:
    sessions: dict[int, list[list[int]]] = {}
    for session, ids in conversations(seed):
        sessions.setdefault(session, []).append(ids)
    return list(sessions.values())


def joined(sessions: list[list[list[int]]], group: int, *, is_local: bool) -> list:
    """(session, content of each joined block)."""
    found = []
    for number, requests in enumerate(sessions):
        scope = number if is_local else 0
        for ids in requests:
            parts = [tuple(ids[i : i + group]) for i in range(0, len(ids), group)]
            found.append((number, [hash((scope, part)) for part in parts]))
    return found


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("layout", ["lines", "folder", "one file on several lines"])
def test_weka_is_chained_on_reading(tmp_path, scope, layout):
    sessions = weka_lists(8)
    if layout == "one file on several lines":
        sessions = sessions[:1]
    documents = [weka_session(requests, scope=scope, nested=(1,)) for requests in sessions]
    path = tmp_path / "trace"
    if layout == "folder":
        path.mkdir()
        for number, found in enumerate(documents):
            (path / f"{number:03}.json").write_text(json.dumps(found))
    elif layout == "lines":
        write_lines(path, documents)
    else:
        path.write_text(json.dumps(documents[0], indent=1))
    trace = read_trace(path, ReadOptions(block_tokens=128, arrivals=Arrivals(hours=0)))
    assert trace.format == "weka"
    expected = build(joined(sessions, 2, is_local=scope == "local"))
    order = np.lexsort((np.arange(trace.requests), trace.session))
    paths, others = Paths(trace), Paths(expected)
    pairs: dict[int, int] = {}
    for i, request in enumerate(order.tolist()):
        left, right = paths[request].tolist(), others[i].tolist()
        assert len(left) == len(right)
        assert all(pairs.setdefault(x, y) == y for x, y in zip(left, right, strict=True))
    assert len(set(pairs.values())) == len(pairs)


def test_the_compact_form_is_the_same_trace(tmp_path):
    sessions = weka_lists(9)
    rows: list[dict] = [{"meta": {"block_size": 64}}]
    for number, requests in enumerate(sessions):
        before: list[int] = []
        for turn, ids in enumerate(requests):
            kept = 0
            while kept < min(len(before), len(ids)) and before[kept] == ids[kept]:
                kept += 1
            ranges = [[i, 1] for i in ids[kept:]]
            rows.append(
                {
                    "s": number,
                    "t": 2.0 * turn,
                    "in": len(ids) * 64,
                    "out": 5,
                    "k": kept,
                    "r": ranges,
                }
            )
            before = ids
    compact = read_trace(write_lines(tmp_path / "compact", rows))
    documents = [weka_session(requests, scope="global") for requests in sessions]
    weka = read_trace(write_lines(tmp_path / "weka", documents))
    assert compact.format == "agent-compact"
    assert compact.block_tokens == 256
    assert same_paths(compact, weka)
    assert np.array_equal(compact.arrival_s, weka.arrival_s)


def test_arrivals_clip_gaps_and_follow_the_seed(tmp_path):
    documents = [weka_session([[1], [1, 2], [1, 2, 3]], scope="local")]
    documents[0]["requests"][2]["t"] = 10_000.0
    path = write_lines(tmp_path / "weka", documents)
    one = read_trace(path, ReadOptions(arrivals=Arrivals(hours=2, gap_max_s=100, seed=4)))
    two = read_trace(path, ReadOptions(arrivals=Arrivals(hours=2, gap_max_s=100, seed=5)))
    assert (one.arrival_s - one.arrival_s[0]).tolist() == [0.0, 2.0, 102.0]
    assert 0 <= one.arrival_s[0] < 7200
    assert one.arrival_s[0] != two.arrival_s[0]
    assert one.notes == ("session starts drawn over 2 h (seed 4), idle gaps clipped to 100 s",)


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


# -- what is malformed ----------------------------------------------------------------------------

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"timestamp": 0, "input_length": 600', "no JSON"),
        ("[1, 2]", r"\[1, 2\], not a JSON object"),
        ({**GOOD, "hash_ids": [1, 2.5]}, "an id that is no whole number"),
        ({**GOOD, "hash_ids": [1, None]}, "an id that is no whole number"),
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


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"k": 3, "r": [[9, 1]]}, "k is 3, and the request before has 2 blocks"),
        ({"k": 0, "r": [[9]]}, r"r has \[9\], not \[first id, count\]"),
        ({"k": 0, "r": [[9, 0]]}, r"r has \[9, 0\]"),
        ({"k": 0, "r": [[9, 1 << 40]]}, "r has "),
        ({"k": "0", "r": []}, "k is '0', not a whole number"),
    ],
)
def test_a_malformed_row_of_the_compact_form(tmp_path, row, what):
    first = {"s": 0, "t": 0, "in": 128, "out": 1, "k": 0, "r": [[1, 2]]}
    path = write_lines(tmp_path / "trace", [{"meta": {"block_size": 64}}, first, {**first, **row}])
    with pytest.raises(TraceError, match=what) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_blocks_that_cannot_be_joined(tmp_path):
    path = write_lines(tmp_path / "t", [weka_session([[1]], scope="local")])
    with pytest.raises(TraceError, match="blocks of 64 tokens cannot be joined to blocks of 100"):
        read_trace(path, ReadOptions(block_tokens=100))
