"""The reference for the grpc plane: raw bytes over a gRPC stream in Python, and nothing else.

No protobuf, no store, no checksums: the sender cuts a populated buffer into chunks, the receiver
copies each chunk into its own populated buffer. That is the least a Python process has to do to
have pages of another process in its memory over gRPC. Same library, event loop, socket, chunk size
and allocator settings as kvtier's plane.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np

from benchmarks.common import malloc_environment

__all__ = ["CHUNK_BYTES", "RawClient", "raw_server"]

CHUNK_BYTES = 1 << 20
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class RawClient:
    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
        self._get = self._channel.unary_stream("/raw/Get")
        self._put = self._channel.stream_unary("/raw/Put")

    async def get(self, into: memoryview) -> None:
        at = 0
        async for chunk in self._get(len(into).to_bytes(8, "little")):
            into[at : at + len(chunk)] = chunk
            at += len(chunk)
        assert at == len(into)

    async def put(self, source: memoryview) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(source), CHUNK_BYTES):
                yield bytes(source[at : at + CHUNK_BYTES])

        answer = await self._put(chunks())
        assert int.from_bytes(answer, "little") == len(source)

    async def close(self) -> None:
        await self._channel.close()


class _Service:
    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(np.random.default_rng(1).bytes(nbytes))
        self._target = memoryview(bytearray(nbytes))

    async def get(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        nbytes = int.from_bytes(request, "little")
        for at in range(0, nbytes, CHUNK_BYTES):
            yield bytes(self._memory[at : min(at + CHUNK_BYTES, nbytes)])

    async def put(self, chunks: AsyncIterator[bytes], context: Any) -> bytes:
        at = 0
        async for chunk in chunks:
            self._target[at : at + len(chunk)] = chunk
            at += len(chunk)
        return at.to_bytes(8, "little")


async def _serve(url: str, nbytes: int) -> None:
    service = _Service(nbytes)
    server = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "Get": grpc.unary_stream_rpc_method_handler(service.get),
        "Put": grpc.stream_unary_rpc_method_handler(service.put),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    server.add_insecure_port(url)
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.wait_for_termination()


@contextmanager
def raw_server(url: str, nbytes: int) -> Iterator[None]:
    """The reference server as a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.raw_stream", url, str(nbytes)],
        stdout=subprocess.PIPE,
        env=malloc_environment(),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("nbytes", type=int)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.url, arguments.nbytes))
