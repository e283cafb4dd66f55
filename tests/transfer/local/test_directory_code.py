"""What the compiler has made of the directory's loops: every load and store of shared words is
there, as many times as it was written down. The same counts fail for plain accesses, which LLVM
merges: that is the control."""

from __future__ import annotations

import re
from types import FunctionType

import numpy as np
import pytest

pytest.importorskip("numba", reason="numba is not installed")

import numba

from kvtier.transfer.local import atomics, kernels, owner_kernels

OPTIONS = {"nogil": True, "error_model": "numpy"}


def with_globals(part, **changed):
    """The part compiled anew, with other names behind its names."""
    function = part.py_func
    return numba.njit(forceinline=True, **OPTIONS)(
        FunctionType(function.__code__, function.__globals__ | changed, function.__name__)
    )


def code_of(function, signature: str) -> str:
    """LLVM code of the optimised function, without what calls it from Python."""
    made = numba.njit(signature, **OPTIONS)(function)
    llvm = next(iter(made.inspect_llvm().values()))
    bodies = [
        body
        for body in re.findall(r"^define [^\n]*\{\n.*?^\}", llvm, re.MULTILINE | re.DOTALL)
        if "@_ZN" in body.partition("\n")[0] and "cpython" not in body.partition("\n")[0]
    ]
    return "\n".join(bodies)


def twice(part):
    def function(address, row):
        return part(address, row) and part(address, row)

    return function


def loads(llvm: str) -> tuple[int, int]:
    """(atomic loads, plain loads of words)."""
    return (
        len(re.findall(r"load atomic i64, .* acquire, align 8", llvm)),
        len(re.findall(r"= load (?:i64|<\d+ x i64>),", llvm)),
    )


def test_a_recheck_loads_all_sixteen_words_each_time():
    once = code_of(lambda address, row: kernels._is_same(address, row), "boolean(int64, int64)")
    both = code_of(twice(kernels._is_same), "boolean(int64, int64)")
    assert loads(once)[0] == 16
    assert loads(both)[0] == 32


def test_control_plain_loads_are_merged():
    plain = with_globals(kernels._is_same, load_acquire=atomics.load_own)
    once = code_of(lambda address, row: plain(address, row), "boolean(int64, int64)")
    both = code_of(twice(plain), "boolean(int64, int64)")
    assert loads(once)[0] == loads(both)[0] == 0
    assert loads(both)[1] == loads(once)[1] > 0


def test_a_copy_ends_with_a_load_of_the_mix_of_its_own():
    """The mix was looked at before the words were copied: it has to be loaded again after them."""

    def function(address, row, seed):
        if atomics.load_acquire(address + 120) == np.uint64(1):
            return False
        return kernels._take(address, row, seed)

    llvm = code_of(function, "boolean(int64, int64, uint64)")
    assert loads(llvm)[0] == 17


def looked_at_twice(load):
    def function(address):
        return load(address) != np.uint64(1) and load(address) != np.uint64(2)

    return function


def test_control_a_plain_second_look_is_dropped():
    llvm = code_of(looked_at_twice(atomics.load_acquire), "boolean(int64)")
    assert loads(llvm) == (2, 0)
    llvm = code_of(looked_at_twice(atomics.load_own), "boolean(int64)")
    assert loads(llvm) == (0, 1)


def test_publishing_marks_stores_and_ends_with_the_mix():
    llvm = code_of(lambda address, row: owner_kernels._publish(address, row), "void(int64, int64)")
    stores = re.findall(r"store atomic i64 (\S+), ptr (\S+) release, align 8", llvm)
    assert len(stores) == 17
    assert stores[0][0] == "1"
    assert stores[0][1] == stores[16][1]
    assert llvm.index("fence release") < llvm.index(stores[1][1] + " release")


def marked_and_done(store):
    def function(address, value):
        store(address, np.uint64(1))
        store(address, value)

    return function


def test_control_a_plain_mark_is_dropped():
    llvm = code_of(marked_and_done(atomics.store_release), "void(int64, uint64)")
    assert len(re.findall(r"store atomic i64 \S+, ptr \S+ release", llvm)) == 2
    llvm = code_of(marked_and_done(atomics.store_own), "void(int64, uint64)")
    assert len(re.findall(r"store i64 %\S+, ptr", llvm)) == 1
    assert "store i64 1" not in llvm


def test_the_recheck_holds_its_atomic_loads():
    """Open or not, an entry, and elsewhere: the moves, a mix, an entry, the moves again."""
    kernel = kernels.recheck
    made = numba.njit(kernel.nopython_signatures[0], **OPTIONS)(kernel.py_func)
    llvm = next(iter(made.inspect_llvm().values()))
    assert loads(llvm)[0] == 1 + 16 + 1 + 1 + 16 + 1
