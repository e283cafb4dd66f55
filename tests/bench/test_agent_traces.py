"""Traces of agents, weka's and the compact form: one trace, chained; what is malformed is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.errors import TraceError
from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.trace import Paths
from tests.bench.traces import build, conversations, same_paths, write_lines


def weka_session(
    requests: list[list[int]], *, scope: str, nested: tuple[int, ...] = ()
) -> dict[str, object]:
    entries: list[dict] = []
    for number, ids in enumerate(requests):
        entry = {"t": 2.0 * number, "type": "n", "in": len(ids) * 64, "out": 5, "hash_ids": ids}
        if number in nested:
            entry = {"t": 2.0 * number, "requests": [entry]}
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


# -- what is malformed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"k": 3, "r": [[9, 1]]}, "k is 3, and the request before has 2 blocks"),
        ({"k": 0, "r": [[9]]}, r"r has \[9\], not \[first id, count\]"),
        ({"k": 0, "r": [[9, 0]]}, r"r has \[9, 0\]"),
        ({"k": 0, "r": [[9, 1 << 40]]}, "r has "),
        ({"k": "0", "r": []}, "k is '0', not a whole number"),
        ({"k": 2, "r": [], "in": 10**9}, "2 blocks of 64 tokens do not fit in 1000000000"),
        ({"k": 2, "r": [[7, 6]], "in": 64}, "8 blocks of 64 tokens do not fit in 64"),
        ({"meta": {"block_size": 32}}, "meta is not the first line"),
    ],
)
def test_a_malformed_row_of_the_compact_form(tmp_path, row, what):
    first = {"s": 0, "t": 0, "in": 128, "out": 1, "k": 0, "r": [[1, 2]]}
    path = write_lines(tmp_path / "trace", [{"meta": {"block_size": 64}}, first, {**first, **row}])
    with pytest.raises(TraceError, match=what) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(("scope", "blocks"), [("global", 1), ("local", 2)])
def test_ids_of_the_compact_form_have_their_scope(tmp_path, scope, blocks):
    rows: list[dict] = [{"meta": {"block_size": 64, "hash_id_scope": scope}}]
    rows += [{"s": s, "t": 0, "in": 64, "out": 1, "k": 0, "r": [[7, 1]]} for s in (3, 4)]
    assert read_trace(write_lines(tmp_path / "trace", rows)).blocks_seen == blocks


def test_an_unknown_scope_is_refused(tmp_path):
    what = "hash_id_scope is 'Global', neither 'local' nor 'global'"
    meta = {"meta": {"block_size": 64, "hash_id_scope": "Global"}}
    with pytest.raises(TraceError, match=f":1: meta: {what}"):
        read_trace(write_lines(tmp_path / "compact", [meta]))
    with pytest.raises(TraceError, match=f":1: {what}"):
        read_trace(write_lines(tmp_path / "weka", [weka_session([[1]], scope="Global")]))


def test_a_session_of_the_compact_form_that_returns(tmp_path):
    rows = [{"s": s, "t": 0, "in": 64, "out": 1, "k": 0, "r": [[s, 1]]} for s in (0, 1, 0)]
    with pytest.raises(TraceError, match=":3: session 0 goes on after another one"):
        read_trace(write_lines(tmp_path / "trace", rows))


@pytest.mark.parametrize("layout", ["lines", "indented"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"in": 10**9}, r"requests\[1\].requests\[0\]: 2 blocks of 64 tokens do not fit in 10+$"),
        ({"in": 0}, r"requests\[1\].requests\[0\]: 2 blocks of 64 tokens do not fit in 0$"),
        ({"hash_ids": [1, True]}, r"requests\[1\].requests\[0\]: hash_ids has an id that is no"),
        ({"hash_ids": [1, 1 << 66]}, r"requests\[1\].requests\[0\]: hash_ids has an id of more"),
    ],
)
def test_a_malformed_request_of_a_weka_session(tmp_path, change, what, layout):
    session: dict = weka_session([[1], [1, 2]], scope="local", nested=(1,))
    session["requests"][1]["requests"][0] |= change
    path = tmp_path / "trace"
    path.write_text(json.dumps(session, indent=1 if layout == "indented" else None))
    where = f"{path}:" if layout == "indented" else f"{path}:1:"
    with pytest.raises(TraceError, match=f"^{where} {what}"):
        read_trace(path)


def test_weka_sessions_of_two_block_sizes(tmp_path):
    sessions = [weka_session([[1]], scope="local") for _ in range(2)]
    sessions[1]["block_size"] = 128
    with pytest.raises(TraceError, match=":2: block_size is 128, and 64 in the sessions before"):
        read_trace(write_lines(tmp_path / "trace", sessions))


def test_tokens_after_the_last_whole_block_of_an_agent_are_never_found(tmp_path):
    # Five blocks of 64 tokens are two of 256; 10 tokens after them have no id.
    session: dict = weka_session([[1, 2, 3, 4, 5]] * 2, scope="local")
    for request in session["requests"]:
        request["in"] += 10
    trace = read_trace(write_lines(tmp_path / "trace", [session]))
    assert trace.tokens(trace.blocks).tolist() == [320, 320]


def test_blocks_that_cannot_be_joined(tmp_path):
    path = write_lines(tmp_path / "t", [weka_session([[1]], scope="local")])
    with pytest.raises(TraceError, match="blocks of 64 tokens cannot be joined to blocks of 100"):
        read_trace(path, ReadOptions(block_tokens=100))
