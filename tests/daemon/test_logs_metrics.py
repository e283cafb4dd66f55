"""Names that operators rely on: every event and every metric stands in its registry."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from grpc._cython import cygrpc
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.config import LogFormat, LogLevel
from kvtier.core.page import Tier
from kvtier.daemon.logs import EVENTS, setup_logging
from kvtier.daemon.metrics import METRICS, Exporter, MetricKind, Metrics, metrics_markdown

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def event_of(node: ast.AST) -> str | None:
    """The event that a dict of fields names; its message is a sentence."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            is_event = isinstance(key, ast.Constant) and key.value == "event"
            if is_event and isinstance(value, ast.Constant):
                return str(value.value)
    return None


def logged_events(repo: Path) -> dict[str, str]:
    """event -> where, for every `log.<level>("...")` in the package, and every field `event`."""
    found = {}
    for path in sorted((repo / "kvtier").rglob("*.py")):
        if "v1" in path.parts or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (event := event_of(node)) is not None:
                found[event] = f"{path.relative_to(repo)}:{node.lineno}"
                continue
            is_log = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and getattr(node.func.value, "id", "") == "log"
            )
            if is_log:
                name = node.args[0]
                where = f"{path.relative_to(repo)}:{node.lineno}"
                if any(event_of(part) for part in ast.walk(node)):
                    continue
                assert isinstance(name, ast.Constant), f"{where}: an event is a plain name"
                found[name.value] = where
    return found


def test_every_event_is_registered_and_every_registered_event_is_logged(repo):
    found = logged_events(repo)
    unknown = {name: where for name, where in found.items() if name not in EVENTS}
    assert not unknown, "add them to kvtier/daemon/logs.py"
    assert set(EVENTS) - set(found) == set(), "nobody logs these"


@pytest.fixture
def lines(capsys):
    """Begins logging through `setup_logging`; returns what reads it. Puts the root logger back."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]

    def start(style: LogFormat):
        setup_logging(LogLevel.INFO, style)
        return lambda: capsys.readouterr().err

    yield start
    logging.captureWarnings(False)
    root.setLevel(before[0])
    root.handlers[:] = before[1]


def test_json_lines(lines):
    text = lines(LogFormat.JSON)
    log = logging.getLogger("kvtier.test")
    log.info("daemon.ready", extra={"listen": 'a "b"\n', "count": 3})
    log.debug("daemon.stopped")
    first = json.loads(text())
    assert first.pop("time").endswith("Z")
    assert first == {"level": "info", "event": "daemon.ready", "listen": 'a "b"\n', "count": 3}


def test_logfmt_lines(lines):
    text = lines(LogFormat.LOGFMT)
    logging.getLogger("kvtier.test").warning(
        "daemon.degraded", extra={"what": "a b=c", "plain": "x", "none": None, "yes": True}
    )
    line = text()
    assert line.count("\n") == 1
    assert line.split(" ", 1)[1] == (
        'level=warning event=daemon.degraded what="a b=c" plain=x none=null yes=true\n'
    )


def test_foreign_lines_and_tracebacks(lines):
    text = lines(LogFormat.JSON)
    logging.getLogger("somebody").error("100 %s", "percent")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("kvtier.test").exception("rpc.crashed", extra={"rpc": "Get"})
    first, second = map(json.loads, text().splitlines())
    assert (first["event"], first["logger"]) == ("log", "somebody")
    assert first["message"] == "100 percent"
    assert second["event"] == "rpc.crashed"
    assert "ValueError: boom" in second["traceback"]


def test_a_traceback_is_in_its_line(lines):
    text = lines(LogFormat.LOGFMT)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("kvtier.test").exception("rpc.crashed", extra={"rpc": "Get"})
    (line,) = text().splitlines()
    assert " event=rpc.crashed rpc=Get traceback=" in line
    assert json.loads(line.partition("traceback=")[2]).splitlines()[-1] == "ValueError: boom"


def test_a_call_that_was_cut_off_is_one_event(lines):
    """gRPC's own logger, given what it says in such a case, and what it says of a fault."""
    text = lines(LogFormat.LOGFMT)
    setup_logging(LogLevel.INFO, LogFormat.LOGFMT)  # twice is as once
    library = logging.getLogger(cygrpc.__name__)
    try:
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 8")
    except cygrpc.ExecuteBatchError:
        library.exception(
            "ExecuteBatchError raised in core by servicer method [/kvtier.v1.Admin/GetCapabilities]"
        )
        library.exception("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/a/B")
    not_handled = "Exception not handled by _handle_exceptions in servicer method [/a/Verify]"
    for error in (asyncio.CancelledError(), KeyError("x")):
        library.error(not_handled, exc_info=error)
    first, second, third, fourth = text().splitlines()
    assert third.split(" ", 1)[1] == "level=info event=rpc.cut_off rpc=/a/Verify why=cancelled"
    assert " level=error event=log " in fourth
    assert first.split(" ", 1)[1] == (
        "level=info event=rpc.cut_off rpc=/kvtier.v1.Admin/GetCapabilities "
        'why="Failed grpc_call_start_batch: 8"'
    )
    assert " level=error event=log " in second
    assert "KeyError" in second


# -- metrics --------------------------------------------------------------------------------------


def readings():
    return {spec.name: {tuple("x" for _ in spec.labels): 1.0} for spec in METRICS}


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(readings)
    made.is_counting = True
    return made


def families(metrics: Metrics):
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_what_is_exported_is_what_the_table_says(metrics):
    metrics.rpc_ended("Get", "OK", 0.1)
    metrics.put_ended(["stored"], 1)
    metrics.get_ended(["hit"], 1, {Tier.NVME: 1})
    found = families(metrics)
    expected = {spec.name.removesuffix("_total"): spec for spec in METRICS}
    assert set(found) == set(expected)
    for name, spec in expected.items():
        family = found[name]
        assert family.type == spec.kind.value, name
        assert family.documentation == spec.help
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(spec.labels), name
        assert spec.name.startswith("kvtier_")
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)


def test_calls_and_pages_are_counted(metrics):
    metrics.rpc_ended("Get", "OK", 0.002)
    metrics.rpc_ended("Get", "UNAVAILABLE", 20.0)
    metrics.get_ended(["hit", "miss", "hit"], 4096, {Tier.HOST: 1, Tier.NVME: 1})
    metrics.put_ended(["stored", "exists"], 100)
    assert metrics.page_totals() == {
        "get_hit": 2, "get_miss": 1, "put_stored": 1, "put_exists": 1, "hit_host": 1, "hit_nvme": 1,
    }  # fmt: skip
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in families(metrics).values()
        for s in family.samples
    }
    assert samples["kvtier_get_pages_total", ("code", "hit")] == 2
    assert samples["kvtier_get_hits_total", ("tier", "nvme")] == 1
    assert samples["kvtier_sent_bytes_total",] == 4096
    assert samples["kvtier_received_bytes_total",] == 100
    assert samples["kvtier_rpc_seconds_count", ("rpc", "Get")] == 2
    assert samples["kvtier_rpcs_total", ("rpc", "Get"), ("status", "UNAVAILABLE")] == 1


def test_self_tests_do_not_count():
    metrics = Metrics(readings)
    metrics.rpc_ended("Get", "OK", 0.1)
    metrics.put_ended(["stored"], 1)
    assert metrics.page_totals() == {}


def test_the_reference_page_is_up_to_date(repo):
    assert (repo / "docs" / "metrics.md").read_text() == metrics_markdown(), "run `make docs`"


def test_the_exporter_gives_everything_back(metrics):
    exporter = Exporter(metrics.registry, "127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="in use"):
            Exporter(metrics.registry, "127.0.0.1", exporter.port)
    finally:
        exporter.close()


def test_an_event_of_the_library_is_a_sentence_with_a_field(lines):
    text = lines(LogFormat.LOGFMT)
    words = {"event": "local.not_attached", "why": "no socket"}
    logging.getLogger("kvtier.test").warning("shared memory is not used: no socket", extra=words)
    (line,) = text().splitlines()
    assert line.endswith('level=warning event=local.not_attached why="no socket"')


def test_a_program_without_logging_hears_nothing_of_the_library():
    """Python's last resort would print bare words to its standard error."""
    script = "import logging, kvtier; logging.getLogger('kvtier.client').warning('words')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stderr == b""
