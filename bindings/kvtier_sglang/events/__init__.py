"""KV events of kvtier's tiers, in the format that SGLang publishes its own in.

    Watch of the daemon -> mirror (what is there, whole) -> wire (msgpack) -> outlet (ZeroMQ)
    hooks of the plugin -> blocks (which tokens a page is of)

SGLang tells routers what lies on the device and in its host pool; this tells what lies in kvtier's
host memory and on NVMe. `publisher` puts the parts together; only `outlet` needs pyzmq.
"""

from __future__ import annotations
