"""Kind 36, STALEWRITE: what was begun before a delete or a bump and ends after it never becomes
visible, neither in this life of the daemon nor in the next.
"""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from fault_rig import GetCode, Pages, metrics, records, tier_of

import kvtier
from kvtier.core.page import DeleteCode, PutCode, Tier
from kvtier.errors import StaleGeneration
from kvtier.v1 import page_pb2, transfer_pb2
from tests.daemon.raw_calls import RawClient, error_of, key_of, opaque_layout, payload_of, put_page

HIT, MISS, STALE = GetCode.HIT, GetCode.MISS, GetCode.STALE
PAGES = Pages(500_000)
ROUNDS = 8
WIDTH = 12


@pytest.fixture
def daemon(make_daemon):
    """Checkpoints come all the time: an image of the store may be taken in any moment of a move."""
    return make_daemon("nvme.bytes=64MiB", "nvme.checkpoint_s=0.05", "host.bytes=32MiB").start()


def settle(daemon) -> None:
    deadline = time.monotonic() + 10
    while metrics(daemon)["kvtier_moves_under_way"]:
        assert time.monotonic() < deadline, "movements do not end"
        time.sleep(0.01)


def check_gone(daemon, connect, kv, pages: Pages, numbers) -> None:
    """Nowhere now, and nowhere after a kill; nothing of them is left in the books."""
    settle(daemon)
    ns = kv.namespace(pages.layout)
    for _ in range(2):
        assert [item.reason for item in ns.lookup(pages.keys(numbers))] == [MISS] * len(numbers)
        assert pages.get(ns, numbers) == [MISS] * len(numbers)
        deadline = time.monotonic() + 10
        while (nvme := tier_of(kv)).used_bytes and time.monotonic() < deadline:
            time.sleep(0.01)  # swept in the background
        assert (nvme.pages_sealed, nvme.pages_filling, nvme.pages_retiring) == (0, 0, 0)
        assert nvme.used_bytes == 0
        daemon.kill()
        daemon.start()
        kv = connect(daemon)
        ns = kv.namespace(pages.layout)


def test_a_demotion_overtaken_by_a_delete(daemon, connect):
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    for turn in range(ROUNDS):
        numbers = range(turn * WIDTH, (turn + 1) * WIDTH)
        PAGES.put(ns, numbers, durable=False)
        assert ns.demote(PAGES.keys(numbers)).hits == WIDTH
        time.sleep(0.002 * turn)
        assert set(ns.delete(PAGES.keys(numbers))) == {DeleteCode.DELETED}
        assert PAGES.get(ns, numbers) == [MISS] * WIDTH
    overtaken = metrics(daemon)['kvtier_moves_total{result="gone",way="down"}']
    assert overtaken > 0
    check_gone(daemon, connect, kv, PAGES, range(ROUNDS * WIDTH))


def test_a_demotion_overtaken_by_a_bump(daemon, connect):
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    for turn in range(ROUNDS):
        numbers = range(turn * WIDTH, (turn + 1) * WIDTH)
        PAGES.put(ns, numbers, durable=False)
        assert ns.demote(PAGES.keys(numbers)).hits == WIDTH
        time.sleep(0.002 * turn)
        ns.bump()
        assert PAGES.get(ns, numbers) == [STALE] * WIDTH
        ns.reopen()
        assert PAGES.get(ns, numbers) == [MISS] * WIDTH
    check_gone(daemon, connect, kv, PAGES, range(ROUNDS * WIDTH))


@pytest.mark.parametrize("how", ["delete", "bump"])
def test_a_durable_put_overtaken(daemon, connect, how):
    """It waits for the device while its pages are deleted: it is answered, and they are gone."""
    kv = connect(daemon)
    ns, other = kv.namespace(PAGES.layout), connect(daemon).namespace(PAGES.layout)
    not_durable = 0
    for turn in range(ROUNDS):
        numbers = range(turn * WIDTH, (turn + 1) * WIDTH)
        keys, pages, answers = PAGES.keys(numbers), [PAGES.page(n) for n in numbers], []
        thread = threading.Thread(
            target=lambda k=keys, p=pages, out=answers: out.append(ns.put(k, p, durable="nvme"))
        )
        thread.start()
        while not other.lookup(keys[-1:]).hits:
            assert thread.is_alive() or answers
        if how == "delete":
            assert set(other.delete(keys)) == {DeleteCode.DELETED}
        else:
            other.bump()
            other.reopen()
        assert PAGES.get(other, numbers) == [MISS] * WIDTH
        thread.join()
        assert set(answers[0].reasons) == {PutCode.STORED}
        not_durable += WIDTH - answers[0].durable
        if how == "bump":
            ns.reopen()
        assert PAGES.get(ns, numbers) == [MISS] * WIDTH
    assert how == "bump" or not_durable > 0, "nothing was overtaken"
    check_gone(daemon, connect, kv, PAGES, range(ROUNDS * WIDTH))


def test_a_promotion_overtaken_by_a_delete(daemon, connect):
    numbers = range(40)
    kv = connect(daemon)
    PAGES.put(kv.namespace(PAGES.layout), numbers)
    daemon.kill()
    daemon.start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    assert tier_of(kv).pages_sealed == len(numbers)
    for at in range(0, len(numbers), 10):
        some = range(at, at + 10)
        assert ns.prefetch(PAGES.keys(some)).hits == 10
        time.sleep(0.001 * at / 10)
        assert set(ns.delete(PAGES.keys(some))) == {DeleteCode.DELETED}
        assert PAGES.get(ns, some) == [MISS] * 10
    settle(daemon)
    assert tier_of(kv, Tier.HOST).pages_sealed == 0
    check_gone(daemon, connect, kv, PAGES, numbers)


def half_sent(raw, opened, name, durability, between):
    """A put of one page whose second half is sent after `between()`; its code and what it reached,
    or the error."""
    payload = payload_of(name)

    def messages():
        yield transfer_pb2.PutRequest(
            open=transfer_pb2.PutOpen(handle=opened.handle, durability=durability),
            pages=[put_page(opened, key_of(name), payload)],
            data=payload[: len(payload) // 2],
        )
        time.sleep(0.05)
        between()
        yield transfer_pb2.PutRequest(offset=len(payload) // 2, data=payload[len(payload) // 2 :])

    try:
        answer = raw.put_messages(messages())
    except grpc.RpcError as error:
        return error_of(error)[1]
    return answer.codes[0], answer.reached[0]


@pytest.mark.parametrize("durability", [page_pb2.DURABILITY_HOST, page_pb2.DURABILITY_NVME])
def test_a_put_under_way_when_its_namespace_is_bumped(daemon, connect, durability):
    with RawClient(daemon.url) as raw, RawClient(daemon.url) as other:
        opened = raw.open()
        code, _ = half_sent(raw, opened, "late", durability, lambda: other.bump(opened))
        assert code == PutCode.STALE_GENERATION
        again = raw.open()
        assert again.generation == opened.generation + 1
        assert list(raw.lookup(again, [key_of("late")]).codes) == [MISS]
    kv = connect(daemon)
    assert kv.namespace(opaque_layout(), tenant="").lookup([key_of("late")]).hits == 0
    daemon.kill()
    assert not list(records(daemon.base / "nv"))
    daemon.start()
    with RawClient(daemon.url) as raw:
        assert list(raw.lookup(raw.open(), [key_of("late")]).codes) == [MISS]


def test_a_put_that_ends_after_a_delete_is_newer_than_it(daemon):
    """The delete found no page: what is sealed and durable afterwards stays, also over a kill."""
    with RawClient(daemon.url) as raw, RawClient(daemon.url) as other:
        opened = raw.open()
        deleted = []
        outcome = half_sent(
            raw, opened, "late", page_pb2.DURABILITY_NVME,
            lambda: deleted.extend(other.delete(opened, [key_of("late")])),
        )  # fmt: skip
        assert deleted == [DeleteCode.ABSENT]
        assert outcome == (PutCode.STORED, page_pb2.DURABILITY_NVME)
    daemon.kill()
    daemon.start()
    with RawClient(daemon.url) as raw:
        got = raw.get(raw.open(), [key_of("late")])
        assert got.payloads == {0: payload_of("late")}


def test_an_old_handle_writes_nothing_after_a_restart(daemon, connect):
    """It is bound to a generation that has ended while the daemon was away."""
    pages = Pages(5_000)
    kv, other = connect(daemon), connect(daemon)
    ns = kv.namespace(pages.layout)
    pages.put(ns, range(10))
    other.namespace(pages.layout).bump()
    daemon.kill()
    daemon.start()
    deadline = time.monotonic() + 10
    codes = {PutCode.UNAVAILABLE}
    while PutCode.UNAVAILABLE in codes:
        assert time.monotonic() < deadline
        codes = set(
            ns.put(
                pages.keys(range(10)), [pages.page(n) for n in range(10)], durable="nvme"
            ).reasons
        )
    assert codes == {PutCode.STALE_GENERATION}
    assert set(pages.get(ns, range(10))) == {STALE}
    with pytest.raises(StaleGeneration):
        ns.put(pages.keys([0]), [pages.page(0)]).raise_for_refused()
    with connect(daemon) as fresh:
        assert set(pages.get(fresh.namespace(pages.layout), range(10))) == {kvtier.GetCode.MISS}
