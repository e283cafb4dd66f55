"""The implementations of the fp8 codec that this machine can run."""

from __future__ import annotations

import pytest
import torch

from kvtier.packing import fp8_backend
from kvtier.packing.fp8 import Fp8Backend, backend


@pytest.fixture(
    params=[
        "numba",
        "torch",
        pytest.param("triton", marks=pytest.mark.gpu),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request, monkeypatch):
    """Where tensors have to lie for `kvtier.packing.fp8` to use this implementation."""
    on_cuda = request.param in ("triton", "cuda")
    if on_cuda and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    name = "cuda" if on_cuda else "cpu"
    if request.param in ("torch", "cuda"):
        monkeypatch.setattr(fp8_backend, "compiled", lambda device: None)
        assert backend(name) is Fp8Backend.TORCH
    elif request.param == "triton" and backend(name) is not Fp8Backend.TRITON:
        pytest.skip("triton is not installed")
    else:
        assert backend(name) is Fp8Backend(request.param)
    return name
