"""Shared memory of a batch of CTAs, with a record of who touched each cell since the last barrier.

Two warps are ordered only by a barrier, so within one interval between barriers a cell that one warp writes may not be
touched by another, whatever order the emulator happens to run them in. An asynchronous copy owns its destination from its
issue until its group is waited for; from then on it counts as a write of its warp. A product of warpgroups reads its matrices
from its issue until the four warps have waited for it and met at a barrier; and it sees only what was written before a barrier,
and before a fence between the proxies.
"""

from __future__ import annotations

import numpy as np

from tests.compiled.faults import MemoryFault, Race
from tests.compiled.values import Array

SEVERAL = -1
RUN = 16  # bytes that a product reads as one


class SharedMemory:
    """Bytes [ctas, size], and for each cell of `cell` bytes: the interval and warp of its last write and last read, whether a
    copy to it is in flight, whether its last write was fenced, and the last group of products that reads it.

    Groups are numbered from 1. `group` takes products that are issued now, those up to `done` have been waited for, those up to
    `settled` before the last barrier.

    Args:
        ctas: CTAs of the batch.
        size: bytes of a CTA.
        cell: the fewest bytes that an instruction of the program moves.
    """

    def __init__(self, ctas: int, size: int, cell: int) -> None:
        self.size, self.cell, self.interval = size, cell, 1
        padded = -(-max(size, 1) // 16) * 16
        self.data = np.zeros((ctas, padded), np.uint8)
        shape = (ctas, padded // cell)
        self.written, self.writer = np.zeros(shape, np.int32), np.zeros(shape, np.int16)
        self.read, self.reader = np.zeros(shape, np.int32), np.zeros(shape, np.int16)
        self.flying, self.unfenced = np.zeros(shape, bool), np.zeros(shape, bool)
        self.lent, self.group, self.done, self.settled = np.zeros(shape, np.int32), 1, 0, 0

    def part(self, keep: Array) -> SharedMemory:
        """The memory of some of the CTAs, copied."""
        other = SharedMemory(0, self.size, self.cell)
        for name, value in vars(self).items():
            setattr(other, name, value[keep] if isinstance(value, np.ndarray) else value)
        return other

    def barrier(self) -> None:
        self.interval += 1
        self.settled = self.done

    def fence_proxies(self) -> None:
        """What has been written becomes visible to products."""
        self.unfenced[:] = False

    def commit_products(self) -> None:
        """The products issued so far form a group."""
        self.group += 1

    def wait_for_products(self, most: int) -> None:
        """Until at most so many groups are under way."""
        self.done = max(self.done, self.group - 1 - most)

    def lend(self, cta: Array, address: Array) -> Array:
        """The bytes [runs, 16] at byte addresses [runs] of CTAs [runs], to a product of the group that is open."""
        self._check(address, RUN)
        at = (cta * self.data.shape[1] + address) // RUN
        flying, written, unfenced, lent = (
            x.reshape(-1, RUN // self.cell) for x in (self.flying, self.written, self.unfenced, self.lent)
        )
        if flying[at].any():
            raise Race("a product reads shared memory to which a copy is in flight")
        if (written[at] == 0).any():
            raise MemoryFault("a product reads shared memory that was never written")
        if (written[at] == self.interval).any():
            raise Race("a product reads what was written since the last barrier")
        if unfenced[at].any():
            raise Race("a product reads what no fence.proxy.async has made visible to it")
        lent[at] = self.group
        return self.data.reshape(-1, RUN)[at]

    def load(self, cta: Array, warp: Array, address: Array, width: int, count: int) -> Array:
        """[lanes, count] unsigned numbers of `width` bytes at byte addresses [lanes] of CTAs [lanes], read by warps [lanes]."""
        self._check(address, width * count)
        self._note_read(cta, warp, self._cells(cta, address, width * count))
        return self._numbers(width)[self._index(cta, address, width, count)]

    def store(self, cta: Array, warp: Array, address: Array, numbers: Array) -> None:
        """Store [lanes, count] unsigned numbers. Warps may store the same value to one place."""
        width, count = numbers.dtype.itemsize, numbers.shape[1]
        self._check(address, width * count)
        index, view = self._index(cta, address, width, count), self._numbers(width)
        changed = (view[index] != numbers).any()
        cells = self._cells(cta, address, width * count)
        self._note_write(warp, cells, bool(changed))
        view[index] = numbers
        if changed and (view[index] != numbers).any():
            raise Race("one instruction stores different values to one place of shared memory")

    def reserve(self, cta: Array, warp: Array, address: Array, size: int) -> None:
        """A copy of `size` bytes to each address has been issued."""
        self._check(address, size)
        cells = self._cells(cta, address, size)
        self._note_write(warp, cells, True)
        self.flying.reshape(-1)[cells] = True

    def land(self, cta: Array, warp: Array, address: Array, numbers: Array) -> None:
        """The copy has been waited for: [lanes, count] numbers arrive."""
        width, count = numbers.dtype.itemsize, numbers.shape[1]
        cells = self._cells(cta, address, width * count)
        self._numbers(width)[self._index(cta, address, width, count)] = numbers
        self.flying.reshape(-1)[cells] = False
        self.unfenced.reshape(-1)[cells] = True
        self.written.reshape(-1)[cells] = self.interval
        self.writer.reshape(-1)[cells] = warp[:, None]

    def _note_read(self, cta: Array, warp: Array, cells: Array) -> None:
        """Record a read; raises unless what it sees is settled."""
        who, interval = warp[:, None], self.interval
        written = self.written.reshape(-1)[cells]
        if self.flying.reshape(-1)[cells].any():
            raise Race("a read of shared memory to which a copy is in flight")
        if (written == 0).any():
            raise MemoryFault("a read of shared memory that was never written")
        if ((written == interval) & (self.writer.reshape(-1)[cells] != who)).any():
            raise Race("a warp reads what another wrote since the last barrier")
        read, reader = self.read.reshape(-1), self.reader.reshape(-1)
        shared = (read[cells] == interval) & (reader[cells] != who)
        reader[cells] = np.where(shared, SEVERAL, who)
        reader[cells] = np.where(reader[cells] == who, who, SEVERAL)
        read[cells] = interval

    def _note_write(self, warp: Array, cells: Array, changed: bool) -> None:
        who = warp[:, None]
        written, writer = self.written.reshape(-1), self.writer.reshape(-1)
        read, reader = self.read.reshape(-1)[cells], self.reader.reshape(-1)[cells]
        if self.flying.reshape(-1)[cells].any():
            raise Race("a write over shared memory to which a copy is in flight")
        lent = self.lent.reshape(-1)[cells]
        if (lent > self.settled).any():
            waited = "with no barrier since it was waited for" if (lent <= self.done).all() else "that is under way"
            raise Race(f"a write over what a product reads {waited}")
        if ((read == self.interval) & (reader != who)).any():
            raise Race("a warp writes over what another read since the last barrier")
        if changed and ((written[cells] == self.interval) & (writer[cells] != who)).any():
            raise Race("two warps write different values to one place of shared memory between barriers")
        written[cells], writer[cells] = self.interval, who
        self.unfenced.reshape(-1)[cells] = True

    def _check(self, address: Array, size: int) -> None:
        if ((address < 0) | (address + size > self.size) | (address % size != 0)).any():
            raise MemoryFault(
                f"{size} bytes at {int(address.max())} of shared memory, which has {self.size}: outside or misaligned"
            )

    def _numbers(self, width: int) -> Array:
        return self.data.reshape(-1).view(f"u{width}")

    def _index(self, cta: Array, address: Array, width: int, count: int) -> Array:
        return ((cta * self.data.shape[1] + address) // width)[:, None] + np.arange(count)

    def _cells(self, cta: Array, address: Array, size: int) -> Array:
        return ((cta * self.data.shape[1] + address) // self.cell)[:, None] + np.arange(max(size // self.cell, 1))
