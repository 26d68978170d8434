"""Tensors between pages that may not be touched: an access past either end ends the process with SIGSEGV.

Triton's interpreter reads and writes by address, as a GPU does, so the fault is a real one.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
from typing import Literal

import numpy as np
import torch

Edge = Literal["start", "end"]
PAGE = mmap.PAGESIZE
NOTHING_ALLOWED = 0  # PROT_NONE


class Fenced:
    """Makes tensors whose first byte follows, or whose last byte precedes, a forbidden page. Keep it while they live.

    Args:
        edge: which end of a tensor lies at a forbidden page; at the other there is up to a page of slack.
    """

    def __init__(self, edge: Edge) -> None:
        self.edge, self.regions = edge, list[mmap.mmap]()
        self.libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor full of 0xFF: NaN, or the largest unsigned integer."""
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        room = -(-size // PAGE) * PAGE
        region = mmap.mmap(-1, room + 2 * PAGE)
        self.regions.append(region)
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        for page in (base, base + PAGE + room):
            if self.libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), NOTHING_ALLOWED):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = PAGE if self.edge == "start" else PAGE + room - size
        inside = np.frombuffer(region, np.uint8, size, start)
        inside[:] = 0xFF
        return torch.from_numpy(inside).view(dtype)[: torch.Size(shape).numel()].view(shape)

    def copy(self, t: torch.Tensor) -> torch.Tensor:
        """The same values, shape and order of dims, without gaps, between forbidden pages."""
        order = sorted(range(t.dim()), key=lambda d: -t.stride(d))
        room = self.empty(tuple(t.shape[d] for d in order), t.dtype)
        back = [order.index(d) for d in range(t.dim())]
        return room.permute(back).copy_(t)
