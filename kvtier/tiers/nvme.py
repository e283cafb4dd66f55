"""The NVMe tier: slots in the segment files of one or more devices.

    slot = slab * (segment_bytes // 4096) + unit      slab = device << 20 | local segment

Promise: as `kvtier.tiers.base` says; beside that, no access crosses a segment, and one outside an
existing segment is ERANGE. Slots are sparse: `capacity_bytes` is how much the existing segments
hold and no bound for slot numbers. A device that is not attached is ENODEV, and the others go on.

Parts that together are a multiple of 4096 bytes, as a padded record is, go to the device in one
write, and blocks that lie aligned in memory are not copied; so do reads. An access that begins or
ends inside a block works as well: a write then costs a read more, a read a small copy.

Thread rule: any thread. `attach`, `detach` and `close` may come while I/O is under way; it ends in
its own time.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from operator import index

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.tiers.base import SLOT_BYTES, Buffer, TierOperation, flat_bytes, tier_io_error
from kvtier.tiers.nvme_device import NvmeDevice, open_device
from kvtier.tiers.nvme_geometry import DEVICES_MAX, slab_number, split_slab
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES

__all__ = ["SEGMENT_HEADER_BYTES", "NvmeDevice", "NvmeTier", "open_device"]


class NvmeTier:
    """A TierDevice over `devices`, which it owns: `close` closes those attached then."""

    def __init__(self, devices: Iterable[NvmeDevice], *, segment_bytes: int) -> None:
        assert segment_bytes % SLOT_BYTES == 0 < segment_bytes, segment_bytes
        self._segment_bytes = segment_bytes
        self._units = segment_bytes // SLOT_BYTES
        # Replaced, never changed: readers take no lock.
        self._devices: dict[int, NvmeDevice] = {}
        self._is_closed = False
        for device in devices:
            self.attach(device)

    @property
    def tier(self) -> Tier:
        return Tier.NVME

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the existing segments of the attached devices hold."""
        return self._segment_bytes * len(self.slabs())

    @property
    def devices(self) -> tuple[NvmeDevice, ...]:
        """Those attached, by number."""
        return tuple(device for _, device in sorted(self._devices.items()))

    def slabs(self) -> list[int]:
        """The numbers of the existing segments of the attached devices, rising."""
        return [
            slab_number(device.number, local)
            for device in self.devices
            for local in sorted(device.segments)
        ]

    def slab_of(self, slot: int) -> int:
        return slot // self._units

    def first_slot(self, slab: int) -> int:
        return slab * self._units

    def device_of(self, slab: int) -> NvmeDevice:
        """Raises TierIOError (ENODEV) if it is not attached; for a slot, ask of its slab."""
        return self._device(split_slab(slab)[0], TierOperation.OPEN)

    def attach(self, device: NvmeDevice) -> None:
        """One event loop or thread attaches and detaches."""
        assert device.segment_bytes == self._segment_bytes, device.segment_bytes
        assert device.number not in self._devices, device.number
        self._devices = self._devices | {device.number: device}

    def detach(self, number: int) -> NvmeDevice:
        """Its slots are ENODEV from now on; the caller closes it."""
        device = self._devices[number]
        self._devices = {key: kept for key, kept in self._devices.items() if key != number}
        return device

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """See TierDevice."""
        views = [flat_bytes(part) for part in parts]
        total = sum(view.nbytes for view in views)
        device, local, start = self._place(TierOperation.WRITE, slot, offset, total)
        try:
            device.write_at(local, start, views)
        except OSError as error:
            raise device.failed(TierOperation.WRITE, error, slot=index(slot)) from error

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """See TierDevice."""
        target = flat_bytes(into)
        device, local, start = self._place(TierOperation.READ, slot, offset, target.nbytes)
        try:
            device.read_at(local, start, target)
        except OSError as error:
            raise device.failed(TierOperation.READ, error, slot=index(slot)) from error

    def sync(self, device: int | None = None) -> None:
        """See TierDevice; of one device, or of all attached, each of which is tried.

        Raises TierIOError; see NvmeDevice.sync for what an error means.
        """
        self._refuse_if_closed(TierOperation.SYNC, None)
        if device is not None:
            self._device(device, TierOperation.SYNC).sync()
            return
        errors = []
        for attached in self.devices:
            try:
                attached.sync()
            except TierIOError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def create_segment(self, slab: int) -> None:
        """See NvmeDevice.create_segment."""
        number, local = split_slab(slab)
        self._device(number, TierOperation.WRITE).create_segment(local)

    def remove_segment(self, slab: int) -> None:
        """See NvmeDevice.remove_segment."""
        number, local = split_slab(slab)
        self._device(number, TierOperation.WRITE).remove_segment(local)

    def close(self) -> None:
        """See TierDevice."""
        self._is_closed = True
        devices, self._devices = self._devices, {}
        for device in devices.values():
            device.close()

    def _place(
        self, operation: TierOperation, slot: int, offset: int, length: int
    ) -> tuple[NvmeDevice, int, int]:
        """(device, its segment, byte in the segment's slots). Raises TierIOError."""
        self._refuse_if_closed(operation, slot)
        # As Python integers, which have no width: a numpy slot number would wrap.
        slot, offset = index(slot), index(offset)
        slab, unit = divmod(slot, self._units)
        start = unit * SLOT_BYTES + offset
        number, local = split_slab(slab)
        is_slot = slot >= 0 and number < DEVICES_MAX
        if not is_slot or offset < 0 or start + length > self._segment_bytes:
            words = f"bytes {start} to {start + length} are outside a segment's slots"
            cause = OSError(errno.ERANGE, words)
            raise tier_io_error(Tier.NVME, operation, cause, slot=slot)
        device = self._device(number, operation, slot)
        if local not in device.segments:
            cause = OSError(errno.ERANGE, f"there is no segment {local} on device {number}")
            raise tier_io_error(Tier.NVME, operation, cause, slot=slot)
        return device, local, start

    def _device(self, number: int, operation: TierOperation, slot: int | None = None) -> NvmeDevice:
        self._refuse_if_closed(operation, slot)
        device = self._devices.get(number)
        if device is None:
            cause = OSError(errno.ENODEV, f"device {number} is not attached")
            raise tier_io_error(Tier.NVME, operation, cause, slot=slot)
        return device

    def _refuse_if_closed(self, operation: TierOperation, slot: int | None) -> None:
        if self._is_closed:
            cause = OSError(errno.EBADF, "the tier is closed")
            raise tier_io_error(Tier.NVME, operation, cause, slot=slot)
