"""One rank of a server, as far as storage knows it: a host pool and a PageStore in a process.

Forked from a process that has loaded the code, with the daemon's URL, the rank and whether
attention is latent, and with an input and an output of its own. Each line of its input is
a request, each line of its output the answer. The pool's content depends on the rank alone where
ranks hold different heads, and on nothing where all hold the same.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import torch
from pool_rig import PAGES, hashes, latent_pool, pool_with_heads, store_for

import kvtier
from kvtier_sglang.layouts import Ranks

RANKS = 2


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(url: str, rank: int, *, is_latent: bool) -> None:
    make, seed = (latent_pool, 0) if is_latent else (pool_with_heads, rank)
    pool, expected = make("page_first_direct", seed=seed), make("page_first_direct", seed=seed)
    places = list(range(PAGES))
    with kvtier.connect(url, deadline=5) as kv:
        times = {f"{call}_deadline": 5.0 for call in ("exists", "get", "set")}
        store = store_for(kv, pool, ranks=Ranks(tp_rank=rank, tp_size=RANKS), **times)
        say("ready")
        for line in sys.stdin:
            asked, prompt = json.loads(line)
            names = hashes(PAGES, prompt)
            if asked == "set":
                answer: object = store.set(names, places)
            elif asked == "exists":
                answer = store.exists(names)
            elif asked == "get":
                pool.kv_buffer.fill_(-1)
                found = store.get(names, places)
                first = pool.kv_buffer if is_latent else pool.kv_buffer[0]
                right = expected.kv_buffer if is_latent else expected.kv_buffer[0]
                same = [torch.equal(first[place], right[place]) for place in places]
                answer = [hit and is_same for hit, is_same in zip(found, same, strict=True)]
            else:
                part = store._parts[-1].namespace
                answer = part.delete(part.keys_from(names[5:6])).deleted
            say(answer)


def serve_forks(channel: socket.socket) -> None:
    """A rank for each message, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1 << 12, 2)
        if not message:
            return
        if os.fork() == 0:
            channel.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            url, rank, attention = json.loads(message)
            main(url, rank, is_latent=attention == "latent")
            os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
