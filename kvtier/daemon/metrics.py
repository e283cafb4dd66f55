"""What Prometheus is told. All names are in the table below, and are an interface.

Totals of pages come from the store's own counters when somebody asks, so that a page costs nothing
here; calls are counted once each. Scrapes are served on a thread of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.core.page import GetCode, PutCode, Tier

__all__ = [
    "METRICS",
    "NVME_METRICS",
    "Exporter",
    "MetricKind",
    "MetricSpec",
    "Metrics",
    "metrics_markdown",
]

#: A value for each combination of labels, in the order of the spec's labels.
Samples = Mapping[tuple[str, ...], float]


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    name: str
    kind: MetricKind
    labels: tuple[str, ...] = ()
    help: str


def _spec(name: str, kind: MetricKind, labels: tuple[str, ...], text: str) -> MetricSpec:
    return MetricSpec(name=name, kind=kind, labels=labels, help=text)


_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

METRICS: tuple[MetricSpec, ...] = (
    _spec("kvtier_info", _G, ("version", "boot_id"), "1; names the version and this boot."),
    _spec("kvtier_ready", _G, (), "1 while calls are served, 0 while starting or draining."),
    _spec("kvtier_uptime_seconds", _G, (), "Seconds since the start."),
    _spec("kvtier_degraded", _G, (), "How many things run in a lesser way than configured."),
    _spec("kvtier_plane_active", _G, ("plane",), "1 for every plane that serves."),
    _spec("kvtier_rpcs_total", _C, ("rpc", "status"), "Calls that ended, by gRPC status."),
    _spec("kvtier_rpc_seconds", _H, ("rpc",), "Time from a call's start to its end."),
    _spec("kvtier_rpcs_under_way", _G, ("kind",), "Calls at this moment: call or stream."),
    _spec("kvtier_bytes_under_way", _G, (), "Payload bytes of Puts and Gets at this moment."),
    _spec("kvtier_received_bytes_total", _C, (), "Payload bytes that Puts brought."),
    _spec("kvtier_sent_bytes_total", _C, (), "Payload bytes that Gets took."),
    _spec("kvtier_put_pages_total", _C, ("code",), "Pages of ended Puts, by outcome."),
    _spec("kvtier_get_pages_total", _C, ("code",), "Pages of Gets, by outcome."),
    _spec("kvtier_get_hits_total", _C, ("tier",), "Pages that Gets gave out, by where they lay."),
    _spec("kvtier_lookup_keys_total", _C, ("result",), "Keys of Lookups: hit or miss."),
    _spec("kvtier_pages_total", _C, ("event",), "Copies: stored, evicted, deleted, condemned."),
    _spec("kvtier_refused_commits_total", _C, ("reason",), "Reservations and seals that failed."),
    _spec("kvtier_slabs_moved_total", _C, (), "Slabs that changed their size class."),
    _spec("kvtier_tier_bytes", _G, ("tier", "kind"), "Bytes of a tier, whole slots."),
    _spec("kvtier_tier_pages", _G, ("tier", "state"), "Copies in a tier, by state; pinned ones."),
    _spec("kvtier_moves_total", _C, ("way", "result"), "Pages moved down to NVMe or up from it."),
    _spec("kvtier_moves_dropped_total", _C, ("reason",), "Copies to NVMe that were given up."),
    _spec("kvtier_moves_under_way", _G, (), "Movements that wait or run, but for those of gets."),
    _spec("kvtier_nvme_bytes_total", _C, ("way",), "Bytes of records written to NVMe and read."),
    _spec("kvtier_nvme_disk_bytes", _G, ("path",), "What the files of a device take on its disk."),
    _spec("kvtier_nvme_device_online", _G, ("path",), "1 for a device that is online, else 0."),
    _spec(
        "kvtier_nvme_lost_pages_total",
        _C,
        ("path",),
        "Pages that were misses from when their device went offline.",
    ),
    _spec("kvtier_nvme_io_errors_total", _C, (), "Reads and writes that failed or did not end."),
    _spec("kvtier_nvme_no_room_total", _C, (), "Segments that the file system had no room for."),
    _spec("kvtier_nvme_checkpoints_total", _C, (), "Checkpoints written."),
    _spec("kvtier_nvme_journal_bytes", _G, (), "Length of the present journal."),
    _spec("kvtier_nvme_recovered", _G, ("what",), "What the start found on NVMe, by kind."),
    _spec("kvtier_local_clients", _G, ("role",), "Attachments to the shared memory."),
    _spec(
        "kvtier_local_grant_bytes",
        _G,
        ("state",),
        "Slots that clients may write to, and those kept back from one that may still do so.",
    ),
    _spec("kvtier_local_unlisted_total", _C, (), "Pages that found no place in the directory."),
    _spec(
        "kvtier_device_pages",
        _G,
        ("engine", "pool", "state"),
        "Pages of device pools as their engines tell: free, held, draining; pinned ones.",
    ),
    _spec("kvtier_device_bytes", _G, ("engine", "pool"), "Bytes of a device pool."),
    _spec("kvtier_sessions", _G, (), "Client sessions."),
    _spec("kvtier_handles", _G, (), "Namespace handles of all sessions."),
    _spec("kvtier_namespaces", _G, (), "Namespaces known."),
)

#: Without an NVMe tier these have no values.
NVME_METRICS = tuple(
    spec.name for spec in METRICS if spec.name.startswith(("kvtier_moves", "kvtier_nvme"))
)

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PUSHED = frozenset(
    (
        "kvtier_rpcs_total",
        "kvtier_rpc_seconds",
        "kvtier_received_bytes_total",
        "kvtier_sent_bytes_total",
        "kvtier_put_pages_total",
        "kvtier_get_pages_total",
        "kvtier_get_hits_total",
    )
)


def metrics_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made by `kvtier metrics --markdown`; do not edit. Served at `/metrics` on",
        "`daemon.metrics_listen`. Counters begin at 0 with every start of the daemon.",
        "",
        "| name | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(lines) + "\n"


class Metrics:
    """One daemon's metrics. `read` gives the values of everything that is not counted here.

    It is called on the scraper's thread.
    """

    def __init__(self, read: Callable[[], Mapping[str, Samples]]) -> None:
        #: False while the self-tests run: what they do is nobody's traffic.
        self.is_counting = False
        self.registry = CollectorRegistry(auto_describe=False)
        # A `..._created` series beside every counter tells nothing: all begin with the daemon.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        by_name = {spec.name: spec for spec in METRICS}

        def counter(name: str) -> Counter:
            spec = by_name[name]
            return Counter(name, spec.help, spec.labels, registry=self.registry)

        self._rpcs = counter("kvtier_rpcs_total")
        self._received = counter("kvtier_received_bytes_total")
        self._sent = counter("kvtier_sent_bytes_total")
        self._put_pages = counter("kvtier_put_pages_total")
        self._get_pages = counter("kvtier_get_pages_total")
        self._get_hits = counter("kvtier_get_hits_total")
        seconds = by_name["kvtier_rpc_seconds"]
        self._seconds = Histogram(
            seconds.name, seconds.help, seconds.labels, buckets=_BUCKETS, registry=self.registry
        )
        self._totals: dict[str, int] = {}
        self.registry.register(_Readings(read))

    def rpc_ended(self, rpc: str, status: str, seconds: float) -> None:
        if self.is_counting:
            self._rpcs.labels(rpc, status).inc()
            self._seconds.labels(rpc).observe(seconds)

    def put_ended(self, codes: Iterable[str], payload_bytes: int) -> None:
        """`codes`: the outcome of each page, by name."""
        if self.is_counting:
            self._received.inc(payload_bytes)
            self._count("put", codes, self._put_pages)

    def local_puts(self, codes: Mapping[PutCode, int], payload_bytes: int) -> None:
        """Pages that clients have put by shared memory."""
        if self.is_counting:
            self._received.inc(payload_bytes)
            for code, count in codes.items():
                self._count_code("put", code.name.lower(), count, self._put_pages)

    def get_ended(self, codes: Iterable[str], payload_bytes: int, hits: Mapping[Tier, int]) -> None:
        if self.is_counting:
            self._sent.inc(payload_bytes)
            self._count("get", codes, self._get_pages)
            for tier, count in hits.items():
                self._count_hits(tier, count)

    def local_gets(self, hits: int, misses: int, payload_bytes: int) -> None:
        """Pages that clients have read in the arena by themselves, or not found there."""
        if self.is_counting:
            self._sent.inc(payload_bytes)
            self._count_code("get", GetCode.HIT.name.lower(), hits, self._get_pages)
            self._count_code("get", GetCode.MISS.name.lower(), misses, self._get_pages)
            self._count_hits(Tier.HOST, hits)

    def page_totals(self) -> dict[str, int]:
        """Pages by "put_stored", "get_hit", ..., as GetStatus tells them."""
        return dict(self._totals)

    def _count(self, call: str, codes: Iterable[str], target: Counter) -> None:
        counts: dict[str, int] = {}
        for code in codes:
            counts[code] = counts.get(code, 0) + 1
        for code, count in counts.items():
            self._count_code(call, code, count, target)

    def _count_code(self, call: str, code: str, count: int, target: Counter) -> None:
        if count:
            target.labels(code).inc(count)
            name = f"{call}_{code}"
            self._totals[name] = self._totals.get(name, 0) + count

    def _count_hits(self, tier: Tier, count: int) -> None:
        if count:
            name = tier.name.lower()
            self._get_hits.labels(name).inc(count)
            self._totals[f"hit_{name}"] = self._totals.get(f"hit_{name}", 0) + count


class _Readings(Collector):
    def __init__(self, read: Callable[[], Mapping[str, Samples]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        values = self._read()
        for spec in METRICS:
            if spec.name in _PUSHED:
                continue
            is_counter = spec.kind is MetricKind.COUNTER
            family: Any = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
                spec.name, spec.help, labels=spec.labels
            )
            for labels, value in values[spec.name].items():
                family.add_metric(labels, value)
            yield family


class Exporter:
    """Serves a registry over HTTP until closed. Raises OSError when the address is taken."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        served: tuple[WSGIServer, threading.Thread] = start_http_server(
            port, addr=host, registry=registry
        )
        self._server, self._thread = served
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
