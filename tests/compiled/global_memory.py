"""Global memory: the tensors of a launch, byte by byte, and who has touched them."""

import ctypes
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from tests.compiled.faults import MemoryFault, Race
from tests.compiled.values import Array

CELL = 2  # bytes that share a record of who touched them
NOBODY, SEVERAL = -1, -2


class Region:
    """One allocation: its bytes, which of them belong to a tensor, and the CTA that wrote or read each cell."""

    def __init__(self, base: int, size: int) -> None:
        self.base, self.size = base, size
        padded = (ctypes.c_uint8 * size).from_address(base)
        self.bytes = np.frombuffer(padded, np.uint8)
        self.declared = np.zeros(size, bool)
        self.dense = False
        self.writer = np.full(size // CELL + 1, NOBODY, np.int32)
        self.reader = np.full(size // CELL + 1, NOBODY, np.int32)

    def declare(self, tensor: torch.Tensor) -> None:
        offsets = np.array([tensor.data_ptr() - self.base])
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            steps = np.arange(size if stride else min(size, 1)) * stride * tensor.element_size()
            offsets = (offsets[:, None] + steps).reshape(-1)
        self.declared[offsets[:, None] + np.arange(tensor.element_size())] = True
        self.dense = bool(self.declared.all())


class GlobalMemory:
    """The tensors that a launch may touch, and nothing else. Gaps of a strided tensor are outside it.

    Args:
        tensors: CPU tensors by the name that messages give them; they may overlap.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        regions: dict[int, Region] = {}
        for tensor in self.tensors.values():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                region = regions.setdefault(storage.data_ptr(), Region(storage.data_ptr(), storage.nbytes()))
                region.declare(tensor)
        self.regions = [regions[base] for base in sorted(regions)]
        self.bases = np.array(sorted(regions), np.uint64)

    def read(self, addresses: Array, width: int, count: int, ctas: Array) -> Array:
        """[lanes, count] unsigned numbers of `width` bytes.

        Args:
            addresses: [lanes] uint64.
            width, count: bytes of an element, and elements of a lane.
            ctas: [lanes] linear index of the CTA that reads.
        """
        result = np.empty((addresses.size, count), f"u{width}")
        for region, lanes, offsets in self._places(addresses, width * count, "read"):
            result[lanes] = _elements(region, offsets, width, count)
            cells, who = _cells(offsets, width * count), ctas[lanes][:, None]
            writer = region.writer[cells]
            if ((writer != NOBODY) & (writer != who)).any():
                raise Race(f"CTA {who.flat[0]} reads {self._name(region, offsets[0])}, which another CTA writes")
            reader = region.reader[cells]
            region.reader[cells] = np.where((reader == NOBODY) | (reader == who), who, SEVERAL)
            region.reader[cells] = np.where(region.reader[cells] == who, who, SEVERAL)
        return result

    def write(self, addresses: Array, numbers: Array, ctas: Array) -> None:
        """Store [lanes, count] unsigned numbers; the other arguments are those of `read`."""
        width, count = numbers.dtype.itemsize, numbers.shape[1]
        for region, lanes, offsets in self._places(addresses, width * count, "write"):
            cells, who = _cells(offsets, width * count), ctas[lanes][:, None]
            before = region.writer[cells]
            region.writer[cells] = who
            written_twice = ((before != NOBODY) & (before != who)) | (region.writer[cells] != who)
            reader = region.reader[cells]
            if written_twice.any() or ((reader != NOBODY) & (reader != who)).any():
                lane = int(np.argmax(written_twice.any(1)))
                raise Race(f"CTA {who[lane, 0]} writes {self._name(region, offsets[lane])}, which another CTA reads or writes")
            _view(region, width)[(offsets // width)[:, None] + np.arange(count)] = numbers[lanes]
            if (_elements(region, offsets, width, count) != numbers[lanes]).any():
                raise Race(f"two threads store different values to {self._name(region, offsets[0])}")

    def _places(self, addresses: Array, size: int, verb: str) -> Iterator[tuple[Region, Array, Array]]:
        """(region, lanes, byte offsets) for each region that is touched; every byte is inside a declared tensor."""
        index = np.searchsorted(self.bases, addresses, "right").astype(np.int64) - 1
        for i in np.unique(index):
            lanes = np.nonzero(index == i)[0]
            region = self.regions[max(int(i), 0)]
            offsets = addresses[lanes].astype(np.int64) - region.base
            last = offsets + size
            outside = (offsets < 0) | (last > region.size)
            if not region.dense and not outside.any():
                outside = ~region.declared[offsets[:, None] + np.arange(size)].all(1)
            if outside.any() or (addresses[lanes] % np.uint64(size)).any():
                wrong = np.nonzero(outside)[0]
                what = f"outside every tensor, {wrong.size} lanes" if wrong.size else "misaligned"
                at = self._name(region, int(offsets[wrong[0] if wrong.size else 0]))
                raise MemoryFault(f"{verb} of {size} bytes at {at}: {what}")
            yield region, lanes, offsets

    def _name(self, region: Region, offset: int) -> str:
        """An address as bytes from the start of the tensor that begins nearest below it."""
        address = region.base + int(offset)
        below = [(t.data_ptr(), name) for name, t in self.tensors.items() if t.numel() and t.data_ptr() <= address]
        start, name = max(below, default=(0, "nothing"))
        return f"{name} + {address - start} bytes"


def _view(region: Region, width: int) -> Array:
    return region.bytes[: region.size // width * width].view(f"u{width}")


def _elements(region: Region, offsets: Array, width: int, count: int) -> Array:
    return _view(region, width)[(offsets // width)[:, None] + np.arange(count)]


def _cells(offsets: Array, size: int) -> Array:
    return (offsets // CELL)[:, None] + np.arange(max(size // CELL, 1))
