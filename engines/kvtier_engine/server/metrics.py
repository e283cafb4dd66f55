"""The engine's numbers in Prometheus' text form. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier import GetCode, PutCode

__all__ = ["metrics_text"]

#: Numbers of now; all the others are counters.
_GAUGES = (
    "pages", "pages_cached", "pages_free", "requests_running", "requests_waiting",
    "step_age_seconds",
)  # fmt: skip
#: Counters that are there, at 0, before the first time.
_COUNTERS = (
    "away", "cached_device_tokens", "cached_host_tokens", "cached_nvme_tokens",
    "cached_shared_tokens", "decode_passes", "decode_tokens", "evicted_pages", "foreign_pages",
    "integrity_failures", "loads_skipped", "nonfinite", "offload_skipped_pages",
    "passes_failed", "preemptions", "prefill_pages", "prefill_passes", "requests",
    "requests_cancelled", "requests_done",
    "requests_failed", "requests_refused", "transfers_broken", "transfers_failed",
    *(f"load_{code.name.lower()}_pages" for code in GetCode),
    *(f"offload_{code.name.lower()}_pages" for code in PutCode),
)  # fmt: skip


def metrics_text(stats: Mapping[str, float]) -> str:
    """One line of type and one of value for each name; `kvtier_engine_` before all of them."""
    lines = []
    for name, value in sorted((dict.fromkeys(_COUNTERS, 0) | dict(stats)).items()):
        is_gauge = name in _GAUGES
        full = f"kvtier_engine_{name}" if is_gauge else f"kvtier_engine_{name}_total"
        lines += [f"# TYPE {full} {'gauge' if is_gauge else 'counter'}", f"{full} {value}"]
    return "\n".join(lines) + "\n"
