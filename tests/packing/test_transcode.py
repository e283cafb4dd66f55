"""A transcode gives a new sum only to bytes that it checked and that nobody else can write."""

from __future__ import annotations

import dataclasses
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from packing_samples import FINGERPRINT, PARENT, identity, layout, meta_of

from kvtier.core.page import NO_SUM, Codec
from kvtier.errors import CorruptPage, LayoutError, NonFinite, PageSizeError
from kvtier.packing import transcode as module
from kvtier.packing.checksum import verify_payload
from kvtier.packing.fp8 import pack, unpack
from kvtier.packing.transcode import transcode

PAGE = layout()
RAW = np.random.default_rng(3).standard_normal(PAGE.raw_bytes // 2)
RAW = RAW.astype(ml_dtypes.bfloat16).tobytes()
META = meta_of(PAGE, RAW, session="s1", ttl_ms=5, priority=-1)
NAME = {"fingerprint": FINGERPRINT, "namespace_generation": 3}


def verifies(result) -> bool:
    meta = result.meta
    return verify_payload(
        result.payload.data, meta.payload_sum, **identity(PAGE, meta.codec, meta.length)
    )


def test_raw_to_fp8():
    result = transcode(PAGE, RAW, META, Codec.FP8, **NAME)
    assert result.payload.tobytes() == pack(PAGE, RAW).tobytes()
    assert verifies(result)
    assert result.meta == dataclasses.replace(
        META,
        codec=Codec.FP8,
        length=PAGE.fp8_bytes,
        payload_sum=result.meta.payload_sum,
        origin_sum=META.payload_sum,
        lossy=True,
    )
    assert (result.meta.parent, result.meta.session) == (PARENT, "s1")


def test_and_back_is_still_lossy_and_remembers_the_first_maker():
    there = transcode(PAGE, RAW, META, Codec.FP8, **NAME)
    back = transcode(PAGE, there.payload, there.meta, Codec.RAW, **NAME)
    assert back.payload.tobytes() == unpack(PAGE, there.payload).tobytes()
    assert verifies(back)
    assert (back.meta.codec, back.meta.length) == (Codec.RAW, PAGE.raw_bytes)
    assert back.meta.lossy
    assert back.meta.origin_sum == META.payload_sum != NO_SUM


@pytest.mark.parametrize("position", [0, 1, 700, len(RAW) - 1])
def test_a_damaged_source_gets_no_new_sum(position):
    damaged = bytearray(RAW)
    damaged[position] ^= 0x10
    with pytest.raises(CorruptPage) as caught:
        transcode(PAGE, damaged, META, Codec.FP8, **NAME)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": bytes(32)}, {"namespace_generation": 4}, {"key": bytes(32)}],
    ids=lambda change: next(iter(change)),
)
def test_the_right_bytes_under_another_name_get_no_new_sum(change):
    meta = dataclasses.replace(META, **{k: v for k, v in change.items() if k == "key"})
    name = {**NAME, **{k: v for k, v in change.items() if k != "key"}}
    with pytest.raises(CorruptPage):
        transcode(PAGE, RAW, meta, Codec.FP8, **name)


def changed_after(monkeypatch, step: str, source: bytearray) -> None:
    """Lets the owner of the shared memory write into it right after `step` of the transcode."""
    original = getattr(module, step)

    def and_then_write(*args, **kwargs):
        result = original(*args, **kwargs)
        source[:] = bytes(byte ^ 0xFF for byte in source)
        return result

    monkeypatch.setattr(module, step, and_then_write)


@pytest.mark.parametrize("step", ["verify_payload", "decode", "encode", "payload_sum"])
def test_a_write_after_the_check_changes_nothing(monkeypatch, step):
    shared = bytearray(RAW)
    changed_after(monkeypatch, step, shared)
    result = transcode(PAGE, memoryview(shared), META, Codec.FP8, **NAME)
    assert bytes(shared) != RAW
    assert result.payload.tobytes() == pack(PAGE, RAW).tobytes()
    assert verifies(result)


def test_a_write_before_the_copy_is_found(monkeypatch):
    shared = bytearray(RAW)
    changed_after(monkeypatch, "host_bytes", shared)
    with pytest.raises(CorruptPage):
        transcode(PAGE, memoryview(shared), META, Codec.FP8, **NAME)


def test_under_a_writer_that_never_stops():
    """Whatever the client writes meanwhile: the right page, or CorruptPage, never a third thing."""
    shared = bytearray(RAW)
    want = pack(PAGE, RAW).tobytes()
    stop = threading.Event()

    def scribble() -> None:
        rng = np.random.default_rng(17)
        while not stop.is_set():
            place = int(rng.integers(len(shared)))
            shared[place] ^= 1
            stop.wait(0.0002)
            shared[place] ^= 1
            stop.wait(0.0002)

    writer = threading.Thread(target=scribble)
    writer.start()
    good = bad = 0
    deadline = time.monotonic() + 20
    try:
        while min(good, bad) < 20 and time.monotonic() < deadline:
            try:
                result = transcode(PAGE, memoryview(shared), META, Codec.FP8, **NAME)
            except CorruptPage:
                bad += 1
                continue
            assert result.payload.tobytes() == want
            assert verifies(result)
            good += 1
    finally:
        stop.set()
        writer.join()
    assert min(good, bad) >= 20, f"{good} right, {bad} refused (seed 17): the test shows nothing"


def test_numbers_that_cannot_be_packed():
    values = np.frombuffer(RAW, ml_dtypes.bfloat16).copy()
    values[5] = np.inf
    raw = values.tobytes()
    with pytest.raises(NonFinite, match="segment 'k', layer 0, head 0"):
        transcode(PAGE, raw, meta_of(PAGE, raw), Codec.FP8, **NAME)


def test_an_fp8_page_with_a_bad_scale_and_a_right_sum():
    payload = pack(PAGE, RAW)
    payload[PAGE.scales_span[0] :] = 0
    meta = meta_of(PAGE, payload.data, Codec.FP8)
    with pytest.raises(NonFinite, match="the scale 0"):
        transcode(PAGE, payload, meta, Codec.RAW, **NAME)


def test_what_is_no_transcode():
    with pytest.raises(LayoutError, match="the page is RAW already"):
        transcode(PAGE, RAW, META, Codec.RAW, **NAME)
    with pytest.raises(PageSizeError, match="the source has"):
        transcode(PAGE, RAW[:-1], META, Codec.FP8, **NAME)
    short = dataclasses.replace(META, length=META.length - 1)
    with pytest.raises(PageSizeError, match="the page has"):
        transcode(PAGE, RAW[:-1], short, Codec.FP8, **NAME)


def test_the_source_is_left_as_it_is():
    source = bytearray(RAW)
    transcode(PAGE, source, META, Codec.FP8, **NAME)
    assert bytes(source) == RAW
