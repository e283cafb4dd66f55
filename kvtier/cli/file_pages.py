"""A run of bytes as opaque pages of one size; see `pages` for the format. Loads the client."""

from __future__ import annotations

import hashlib
import struct

from kvtier.client import Connection, connect
from kvtier.core.page import PutCode
from kvtier.errors import DaemonUnavailable
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

__all__ = ["FilePages"]

_UNANSWERED = {"UNAVAILABLE", "TIMEOUT"}


class FilePages:
    """The pages of one key at one daemon. Raises KvtierError when the daemon does not answer."""

    def __init__(self, url: str, key: bytes, *, page_bytes: int, tenant: str) -> None:
        self._url = url
        self._key = key
        self._tenant = tenant
        self.page_bytes = page_bytes
        self._layout = Layout.from_segments(
            [
                Segment(
                    name="bytes",
                    role=Role.OPAQUE,
                    dtype="uint8",
                    layers=1,
                    heads=page_bytes // 1024,
                    dim=1024,
                    scale_rule=ScaleRule.NONE,
                )
            ],
            model_id="kvtier-file",
            revision="1",
            page_tokens=1,
            kv_compute="uint8",
            key_scheme="kvtier-file-1",
        )

    def put(self, run: bytes, timeout_s: float) -> list[PutCode]:
        """The outcome of each page of `run`, the last one filled up with zeros."""
        count = -(-len(run) // self.page_bytes)
        padded = run.ljust(count * self.page_bytes, b"\0")
        with self._connect(timeout_s) as connection:
            namespace = connection.namespace(self._layout, tenant=self._tenant)
            result = namespace.put(namespace.keys_from(self._keys(0, count)), padded)
        self._check_answered({code.name for code in result.reasons})
        return result.reasons

    def get(self, start: int, stop: int, timeout_s: float) -> bytes | None:
        """The bytes of pages `start` to `stop` (exclusive); None when one is not there."""
        run = bytearray((stop - start) * self.page_bytes)
        with self._connect(timeout_s) as connection:
            namespace = connection.namespace(self._layout, tenant=self._tenant)
            result = namespace.get(namespace.keys_from(self._keys(start, stop)), out=run)
        self._check_answered({code.name for code in result.reasons})
        return bytes(run) if result.prefix == stop - start else None

    def _connect(self, timeout_s: float) -> Connection:
        return connect(self._url, deadline=timeout_s, client_name="kvtier command")

    def _keys(self, start: int, stop: int) -> list[bytes]:
        return [
            hashlib.sha256(self._key + struct.pack("<I", index)).digest() if index else self._key
            for index in range(start, stop)
        ]

    def _check_answered(self, reasons: set[str]) -> None:
        if reasons & _UNANSWERED:
            raise DaemonUnavailable(
                f"the daemon at {self._url} did not answer in time",
                remedy="See that it runs and listens there (kvtier doctor); raise --timeout.",
            )
