"""The same computation with its sums taken in another order: as right as the first, and rounded otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Order = Callable[[int], Tensor]


def backwards(n: int) -> Tensor:
    """The order n - 1, n - 2 ... 0.

    Example:
        >>> backwards(3).tolist()
        [2, 1, 0]
    """
    return torch.arange(n).flip(0)


def odd_first(n: int) -> Tensor:
    """The order 1, 3 ... then 0, 2 ...: neighbours are added last.

    Example:
        >>> odd_first(5).tolist()
        [1, 3, 0, 2, 4]
    """
    terms = torch.arange(n)
    return torch.cat([terms[1::2], terms[::2]])


class Reordered(TorchDispatchMode):
    """Inside `with Reordered(order):` every matrix product and every sum, those of a backward too, adds its terms in that order.

    No term changes and none is rounded once more, so what comes out is another equally valid evaluation. It lies below autograd
    and knows nothing of attention: whatever a call is made of, keys, features and queries are permuted where they are summed.

    Args:
        order: from a number of terms to a permutation of them.

    Example:
        >>> with Reordered(backwards):
        ...     print(torch.tensor([1e8, 1.0, -1e8, 1.0]).sum(0).isfinite().item())
        True
    """

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            a, b, *rest = args
            own = self.order(a.shape[-1]).to(a.device)
            return func(a.index_select(-1, own), b.index_select(-2, own), *rest, **kwargs or {})
        if name == "sum" and len(args) > 1:
            x, dims, *rest = args
            for dim in dims or range(x.dim()):
                x = x.index_select(dim, self.order(x.shape[dim]).to(x.device))
            return func(x, dims, *rest, **kwargs or {})
        return func(*args, **kwargs or {})
