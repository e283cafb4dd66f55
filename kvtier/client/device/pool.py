"""DevicePool: the paged KV of one engine, on a device, each page with a tag of its allocation.

Promise: a page belongs to nobody else while it is held, or while a copy reads or writes it; at
every allocation it gets a tag that no page of this process had before. The pool decides who has a
page; what is in it is the engine's.

Threads: allocate, share, free, pin and unpin may be called from any thread. On CUDA the new tags
are written on the stream that is current in the allocating thread: read them on that stream, or
after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from kvtier.client.device.account import Occupancy, PageAccount
from kvtier.client.device.form import PageForm
from kvtier.errors import LayoutError, NonFinite
from kvtier.packing.fp8_torch import quantized
from kvtier.packing.layout import Layout

__all__ = ["NO_TAG", "DevicePool", "on_device"]

#: Every tag of the process comes from here, whatever the pool; `next` is one step for the threads.
_TAGS: Final = itertools.count(1)
#: Numbers of pools that were given no name: over one connection two of one name would hide each
#: other in the daemon's status.
_NAMES: Final = itertools.count(1)
#: Of a page that was never allocated; the places before and behind the pool have it too.
NO_TAG: Final = 0
#: Of (pages, 2, page_tokens, heads, dim): what shares a scale.
_TOKENS_AND_DIM: Final = (2, 4)
#: The one e4m3fn code that is no number, but for its sign.
_NAN_CODE: Final = 0x7F


def on_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers. A GPU copies them when its stream comes to it, and the host does
    not wait for what is queued before.
    """
    is_cuda = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


class DevicePool:
    """`pages` pages of `layout` on `device`.

    `kv` is (pages, 2, layers, page_tokens, heads, dim); each page is one contiguous kvtier page.
    `rows` are the same bytes as uint8 (pages, page bytes): what is put and got. `tags` is int64
    (pages,) on the device. All are zeros at first (scales are 1). Raises
    LayoutError, see PageForm.of.

    `name` is what status and metrics call it; without one it is kv-1, kv-2 and so on in this
    process. A name of your own has to differ from those of other pools on the connection, else
    PoolReporter refuses it.
    """

    def __init__(
        self, layout: Layout, pages: int, device: str | torch.device = "cpu", *, name: str = ""
    ) -> None:
        if pages < 1:
            raise LayoutError(f"a pool of {pages} pages", remedy="give it at least one page")
        self.layout = layout
        self.name = name or f"kv-{next(_NAMES)}"
        self.form = form = PageForm.of(layout)
        self.device = torch.device(device)
        self.rows = torch.zeros((pages, form.nbytes), dtype=torch.uint8, device=self.device)
        shape = (pages, 2, form.layers, form.page_tokens, form.heads, form.dim)
        self.kv = self.rows[:, : form.scales_offset].view(form.dtype).view(shape)
        self._scales: torch.Tensor | None = None
        if form.is_fp8:
            end = form.scales_offset + 2 * form.layers * form.heads * 4
            scales = self.rows[:, form.scales_offset : end].view(torch.float32)
            self._scales = scales.view(pages, 2, form.layers, form.heads)
            self._scales.fill_(1.0)
        # One place more on either side: an id that is off by one there finds NO_TAG.
        self.edged_tags = torch.full((pages + 2,), NO_TAG, dtype=torch.int64, device=self.device)
        self.tags = self.edged_tags[1:-1]
        self._known_tags = np.full(pages, NO_TAG, np.int64)
        self._account = PageAccount(pages, self._forget_tags)

    def __repr__(self) -> str:
        return f"<DevicePool {self.name!r} {self.pages} x {self.form.nbytes} B on {self.device}>"

    @property
    def pages(self) -> int:
        return len(self.rows)

    @property
    def free_pages(self) -> int:
        """Pages that `allocate` can give now."""
        return self._account.free_pages

    @property
    def occupancy(self) -> Occupancy:
        """How many pages are free, held, draining and pinned, at one moment."""
        return self._account.occupancy

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer: a view (pages, page_tokens, heads, dim), strided; write in place."""
        return self.kv[:, 0, layer]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer, as `keys`."""
        return self.kv[:, 1, layer]

    def scales(self, layer: int) -> torch.Tensor:
        """float32 view (pages, 2, heads) of an fp8 pool: [:, 0] is what to multiply q . k with,
        [:, 1] the weighted v, for each KV head. Raises LayoutError for a plain pool.
        """
        if self._scales is None:
            raise LayoutError(
                f"a pool of {self.form.dtype} has no scales", remedy="make it with fp8_layout()"
            )
        return self._scales[:, :, layer]

    def write(
        self, layer: int, ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """K and V (n, page_tokens, heads, dim) of one layer into n whole pages.

        An fp8 pool packs them by the formula of kvtier.packing.fp8, one scale a page, head and K or
        V, and raises NonFinite, writing nothing, for a number that is infinite or NaN. Tokens that
        a page lacks yet must be zeros: they have no part in the scale then.
        """
        places = on_device(ids, torch.int64, self.device)
        if self._scales is None:
            self.keys(layer)[places] = keys.to(self.form.dtype)
            self.values(layer)[places] = values.to(self.form.dtype)
            return
        both = torch.stack((keys, values), dim=1).to(torch.float32)
        if not bool(both.isfinite().all()):
            raise self._non_finite(layer, ids, both)
        codes, scales = quantized(both, _TOKENS_AND_DIM)
        # As bytes: moves of fp8 are not there for every device.
        self.kv[:, :, layer].view(torch.uint8)[places] = codes.view(torch.uint8)
        self.scales(layer)[places] = scales.squeeze(-1).squeeze(2)

    def extremes(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest of what a page's numbers are made of (of an fp8 pool its scales), on
        the device: finite if and only if every number of the page is.
        """
        if self._scales is None:
            least, greatest = self.kv[page].aminmax()
            return least, greatest
        least, greatest = self._scales[page].aminmax()
        is_code = (self.kv[page].view(torch.uint8) & _NAN_CODE).amax() < _NAN_CODE
        return least, torch.where(is_code, greatest, torch.nan)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference and a new tag each. Raises PoolExhausted; all or none.

        Their bytes are those of whoever had them before.
        """
        ids = self._account.allocate(count)
        if ids:
            tags = np.fromiter(itertools.islice(_TAGS, count), np.int64, count)
            self._known_tags[ids] = tags
            both = on_device([ids, tags.tolist()], torch.int64, self.device)
            self.tags[both[0]] = both[1]
        return ids

    def share(self, ids: Sequence[int]) -> None:
        """One more reference on each page, say of a common prefix. Raises PageNotHeld."""
        self._account.share(ids)

    def free(self, ids: Sequence[int]) -> None:
        """Gives one reference of each page back. Raises PageNotHeld, and changes nothing then.

        The last one makes the page free; while a copy uses it, only when that is done.
        """
        self._account.free(ids)

    def pin(self, ids: Sequence[int]) -> None:
        """A copy begins to read or write these pages: until `unpin` they are not given to anybody.
        Raises PageNotHeld.
        """
        self._account.pin(ids)

    def unpin(self, ids: Sequence[int]) -> None:
        """The copy does not touch these pages any more. Raises PageNotHeld."""
        self._account.unpin(ids)

    def references(self, page: int) -> int:
        """How many hold a page; 0 for one that is free or draining."""
        return self._account.references(page)

    def known_tags(self, ids: Sequence[int]) -> list[int]:
        """The present tags as the host knows them, without asking the device; NO_TAG for pages
        that are free.
        """
        known: list[int] = self._known_tags[list(ids)].tolist()
        return known

    def check(self) -> None:
        """free + held + draining = pages, counted anew. Raises PoolInconsistent."""
        self._account.check()

    def _non_finite(self, layer: int, ids: Sequence[int], both: torch.Tensor) -> NonFinite:
        where = both.isfinite().logical_not().nonzero()[0].tolist()
        return NonFinite(
            f"page {ids[where[0]]}, layer {layer}, {'KV'[where[1]]} of token {where[2]}, head "
            f"{where[3]}: the number {float(both[tuple(where)])!r}",
            remedy="abort the request; if it happens again, look for overflow in the model's KV",
        )

    def _forget_tags(self, ids: Sequence[int]) -> None:
        self._known_tags[list(ids)] = NO_TAG
