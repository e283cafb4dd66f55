"""docs/local-plane.md: the formats as their modules describe them."""

from __future__ import annotations

import inspect
from types import ModuleType

from kvtier.transfer.local import entry, frames, header

__all__ = ["page"]

_HEAD = """# The local plane

Made by `make docs` from the modules that it describes; do not edit.

Processes of the daemon's user on its host map two pieces of its memory: the **arena**, in which
the pages of host memory lie as records (`kvtier/packing/record.py`), and the **directory**, which
says where. They come as descriptors over a control socket of mode 0600.

A client finds a page in the directory, copies it out of the arena and verifies the copy, without a
call. It puts pages into slots that it was granted ahead, and has them sealed in batches. It asks
the daemon, over gRPC, for everything else: pages of lower tiers, packed pages, whatever is in
doubt, and all other changes.

The daemon changes the directory before it answers a delete, bump or condemn, so a lookup that
begins after the answer finds nothing of them. A page that is being evicted while it is copied
fails its sum or was whole; it is never served as another one. Neither memory can be cut short by
anybody who has it (seals), and the directory cannot be written by its readers. The arena can be
written by a client that puts, everywhere: those who share it trust each other not to mean harm.
What one of them writes by mistake fails the sum of the page that lay there.

A reader that dies leaves nothing behind. A writer may die, or be stopped, in the middle of a page:
its slots are used again when it has given them back or its process has ended, and a closed socket
is no sign of that. When the daemon dies its clients see the socket's end, answer as without a
daemon, and attach to the next one.

Golden bytes: `tests/golden/directory_v1.hex`, `tests/golden/local_frames_v1.hex`.
"""


def page() -> str:
    sections = [_section(title, module) for title, module in _PARTS]
    return "\n".join([_HEAD, *sections])


_PARTS: tuple[tuple[str, ModuleType], ...] = (
    ("The control socket", frames),
    ("The directory: header", header),
    ("The directory: entries", entry),
)


def _section(title: str, module: ModuleType) -> str:
    return f"## {title}\n\n`{module.__name__}`\n\n{inspect.getdoc(module)}\n"
