"""What the tests of faults share: pages that say whose they are, a look at the daemon's files that
does not use the daemon's code for it, and the daemon's own account of them.

Everything is of one thread, but for `DiskWatch`, which has its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvtier
from kvtier.core.page import Tier
from kvtier.errors import CorruptRecord
from kvtier.packing.record import RecordHeader, decode_header, record_bytes
from kvtier.testing.cells import check_page, make_page

BLOCK = 4096
GetCode = kvtier.GetCode


def until(is_so: Callable[[], object], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def need_tmpfs(base: Path) -> None:
    """Skips a test where nobody can mount a file system for a process of his own."""
    tried = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(base)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tried.returncode:
        pytest.skip(f"tmpfs cannot be mounted in a namespace: {tried.stderr.strip()}")


def layout_of(page_bytes: int, model: str = "faults"):
    """Pages of `page_bytes` opaque bytes."""
    segment = kvtier.Segment(
        name="bytes",
        role=kvtier.Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=1,
        dim=page_bytes,
        scale_rule=kvtier.ScaleRule.NONE,
    )
    return kvtier.Layout.from_segments(
        [segment], model_id=model, revision="1", page_tokens=1, kv_compute="uint8"
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of one namespace, by number: keys, and bytes that name namespace, key and version
    in every cell."""

    page_bytes: int
    name: str = "faults"

    @property
    def layout(self):
        return layout_of(self.page_bytes, self.name)

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.page_bytes)

    def key(self, number: int) -> bytes:
        return hashlib.sha256(f"{self.name} {number}".encode()).digest()

    def keys(self, numbers: Iterable[int]) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def page(self, number: int, version: int = 1) -> bytes:
        return make_page(
            self.page_bytes, namespace=self.name, key=self.key(number), version=version
        )

    def wrong(self, number: int, found: bytes, version: int = 1) -> list[str]:
        """What is wrong with the bytes of a hit; [] for the right ones."""
        faults = check_page(found, namespace=self.name, key=self.key(number), version=version)
        return [str(fault) for fault in faults]

    def put(self, ns, numbers: Sequence[int], *, durable: bool = True, version: int = 1):
        """All of them, each for itself; fails unless all are stored, and durable if asked for."""
        put = ns.put(
            self.keys(numbers),
            [self.page(number, version) for number in numbers],
            durable="nvme" if durable else "host",
            chain=False,
        )
        put.raise_for_refused()
        return put

    def get(self, ns, numbers: Sequence[int], version: int = 1) -> list[kvtier.GetCode]:
        """The outcome of each; fails when a hit has a wrong byte."""
        got = ns.get(self.keys(numbers))
        for number, item, page in zip(numbers, got, got.pages, strict=True):
            if item.reason is GetCode.HIT:
                faults = self.wrong(number, page, version)
                assert not faults, f"page {number} of {self.name}: {faults}"
        return got.reasons


# -- the files, as anybody finds them --------------------------------------------------------------


def disk_usage(*directories: Path) -> int:
    """Bytes that the files below take up, as `du` counts them."""
    total = 0
    for directory in directories:
        for root, _, names in os.walk(directory):
            for name in names:
                try:
                    total += os.lstat(os.path.join(root, name)).st_blocks * 512
                except FileNotFoundError:
                    continue  # removed since it was listed
    return total


def leftovers(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*.tmp")]


@dataclass(frozen=True, slots=True)
class Found:
    """A record in a segment file; its header begins at `offset` of the file."""

    path: Path
    offset: int
    header: RecordHeader

    @property
    def payload_offset(self) -> int:
        return self.offset + BLOCK

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.header.length)


def segments(device: Path) -> list[Path]:
    return sorted(device.glob("segment-????????"))


def records(device: Path, number: int = 0) -> Iterator[Found]:
    """Every sound header of device `number` that lies where it says, whatever the index holds."""
    for path in segments(device):
        units = path.stat().st_size // BLOCK - 1
        first = (number << 20 | int(path.name.removeprefix("segment-"))) * units
        with path.open("rb") as file:
            file.seek(BLOCK)
            for unit in range(units):
                block = file.read(BLOCK)
                if block[:8] != b"\x89KVTREC\n":
                    continue
                try:
                    header = decode_header(block)
                except CorruptRecord:
                    continue
                if header.slot == first + unit and header.tier is Tier.NVME:
                    yield Found(path, BLOCK * (unit + 1), header)


def newest(found: Iterable[Found]) -> dict[tuple[bytes, bytes], Found]:
    """The one with the highest sequence of each (fingerprint, key)."""
    best: dict[tuple[bytes, bytes], Found] = {}
    for record in found:
        name = (record.header.fingerprint, record.header.key)
        if name not in best or best[name].header.sequence < record.header.sequence:
            best[name] = record
    return best


def flip_bit(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


# -- the daemon's own account ----------------------------------------------------------------------


def tier_of(kv, tier: Tier = Tier.NVME):
    return {status.tier: status for status in kv.status().tiers}[tier]


def metrics(daemon) -> dict[str, float]:
    """By the line's name and labels; the daemon needs daemon.metrics_listen=127.0.0.1:0."""
    url = re.findall(r" metrics=(http://\S+)", daemon.log)[-1]
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def recovered(daemon) -> dict[str, int]:
    """What the last start found, by kind."""
    found = re.compile(r'kvtier_nvme_recovered\{what="(\w+)"\}')
    return {
        match[1]: int(value)
        for name, value in metrics(daemon).items()
        if (match := found.fullmatch(name))
    }


def warnings_of(kv) -> str:
    """All of them but that the file system takes no O_DIRECT."""
    return "\n".join(text for text in kv.status().warnings if "page cache" not in text)


class Saved:
    """The files of a daemon that is down, to be put back as they were."""

    def __init__(self, daemon) -> None:
        self._places = (daemon.directory, daemon.base / "nv")
        self._copies = [place.with_name(f"{place.name}.saved") for place in self._places]
        for place, copy in zip(self._places, self._copies, strict=True):
            shutil.copytree(place, copy, symlinks=True)

    def put_back(self) -> None:
        for place, copy in zip(self._places, self._copies, strict=True):
            shutil.rmtree(place)
            shutil.copytree(copy, place, symlinks=True)


class DiskWatch:
    """The most that directories take up, looked at all the time while it runs."""

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        self._ended = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="disk-watch")
        self.highest = 0
        self.looks = 0

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            with self._looking:
                self.highest = max(self.highest, disk_usage(*self._directories))
                self.looks += 1

    def forget(self) -> None:
        """What was before now does not count, nor a look that began before."""
        with self._looking:
            self.highest = 0

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()


def refused(daemon, *options: str) -> str:
    """Starts a daemon that must not start; error and remedy as it says them. It ends by itself."""
    before = len(daemon.log)
    daemon.start(*options, wait=False)
    code = daemon.wait()
    said = daemon.log[before:]
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert said.count("\nerror: ") == 1, said
    assert said.count("\nremedy: ") == 1, said
    return said[said.index("\nerror: ") :]
