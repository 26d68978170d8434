"""Attention with its four projections, as modules: causal, full, and from one sequence to another.

Under tensor parallelism (torch's ColwiseParallel for W_Q, W_K and W_V, RowwiseParallel for W_O; ready plans by
`andrea_triton.distributed.tensor_parallel_plan`) a module works with the heads that its projections give on a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cache import Cache, Rows, rows_tensor
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..spec import Mask, Window, make_spec
from .attend import Call, attend, attend_cache
from .parallel import check_heads, for_heads, kv_heads_here, local, placed, replicated, split_of

ROTARY_BASE = 10000.0


class SelfAttention(nn.Module):
    """Full attention within a sequence, as in an encoder: W_O(attention(W_Q x, W_K x, W_V x)).

    Args:
        d_model: features of x.
        n_head: query heads; they divide d_model.
        n_kv_head: key and value heads, a divisor of n_head; None means n_head.
        bias: whether the projections have one.
        dropout: probability that a weight is dropped, in training mode only.
        scale: factor of q·k; None means 1/sqrt(head dim).
        window: as in `attention`.
        softcap: as in `attention`.
        sinks: give each head a learned sink logit, zero at first.
        rotary: turn queries and keys by their positions.
        backend: as in `attention`, or "naive" for the textbook's own M×N matrix, to compare with.

    Raises:
        ShapeError: a size or setting is wrong.

    Source:
        arXiv 1706.03762 (attention), arXiv 2305.13245 (grouped heads), arXiv 2104.09864 (rotary).

    Example:
        >>> SelfAttention(32, 4, n_kv_head=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    causal = False

    def __init__(
        self,
        d_model: int = 768,
        n_head: int = 12,
        n_kv_head: int | None = None,
        bias: bool = False,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        window: Window = None,
        softcap: float | None = None,
        sinks: bool = False,
        rotary: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        make_spec(causal=self.causal, scale=scale, window=window, softcap=softcap, dropout_p=dropout)
        self.d_model, self.n_head = d_model, n_head
        self.n_kv_head = n_head if n_kv_head is None else n_kv_head
        self.head_dim = head_dim(d_model, n_head, self.n_kv_head)
        if rotary and self.head_dim % 2:
            raise ShapeError(f"head dim is {self.head_dim}; rotary turns pairs of features; wanted an even head dim")
        self.dropout, self.rotary, self.backend = dropout, rotary, backend
        self.scale, self.window, self.softcap = scale, window, softcap
        self.W_Q = nn.Linear(d_model, n_head * self.head_dim, bias=bias)
        self.W_K = nn.Linear(d_model, self.n_kv_head * self.head_dim, bias=bias)
        self.W_V = nn.Linear(d_model, self.n_kv_head * self.head_dim, bias=bias)
        self.W_O = nn.Linear(n_head * self.head_dim, d_model, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(n_head)) if sinks else None

    def forward(self, x: Tensor, *, key_lengths: Tensor | None = None, mask: Mask | Tensor | None = None) -> Tensor:
        """Attention of x with itself.

        Args:
            x: (B, T, d_model).
            key_lengths: (B,) integers; tokens from there on are hidden.
            mask: as in `attention`.

        Returns:
            (B, T, d_model).

        Raises:
            ShapeError, DTypeError, UnsupportedError: as `attention`.
        """
        q, k, v = self.project(x)
        call, key_lengths, mask = for_heads(self.call(), q, split_of(self.W_O), self.n_head, key_lengths, mask)
        return self.merge_heads(placed(attend(q, k, v, self.causal, call, key_lengths, mask), q))

    def call(self) -> Call:
        """The settings of a call, as the mode (training or not) has it."""
        dropout_p = self.dropout if self.training else 0.0
        return Call(self.scale, self.window, self.softcap, self.sinks, dropout_p, self.backend)

    def project(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x, in heads.

        Args:
            x: (B, T, d_model).
            positions: (T,) or (B, T) integers, the tokens' places in their sequence; read by rotary heads only. None means 0 to
                T - 1.

        Returns:
            q (B, n_head, T, head_dim), k and v (B, n_kv_head, T, head_dim), views of (B, T, ...) memory. Where the projections
            are split over ranks, plain tensors hold this rank's heads.

        Raises:
            ShapeError: x does not fit, or the projections give no whole heads.
        """
        q, k, v = self.heads(x)
        if self.rotary:
            positions = torch.arange(q.shape[2], device=x.device) if positions is None else positions
            q, k = rotate(q, positions), rotate(k, positions)
        return q, k, v

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project` before queries and keys are turned."""
        check_features("x", x, self.d_model)
        return in_heads(self, x, x)

    def merge_heads(self, out: Tensor) -> Tensor:
        """W_O of (B, n_head, T, head_dim), or this rank's heads, as (B, T, d_model)."""
        return self.W_O(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """What the projections do not show."""
        return f"heads={self.n_head}, kv_heads={self.n_kv_head}, window={self.window}, backend={self.backend}"


class CausalSelfAttention(SelfAttention):
    """Attention of each token to itself and those before it: for training a decoder and, with a cache, for decoding.

    Args:
        d_model, n_head, n_kv_head, bias, dropout, scale, window, softcap, sinks, rotary, backend: as in `SelfAttention`.

    Example:
        >>> from andrea_triton.cache import KVCache
        >>> layer, x = CausalSelfAttention(32, 4).eval(), torch.randn(1, 5, 32)
        >>> cache = KVCache(1, 4, 16, 8)
        >>> with torch.no_grad():
        ...     steps = [layer(x[:, t : t + 1], cache=cache) for t in range(5)]
        >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-6)
        True
    """

    causal = True

    def forward(
        self,
        x: Tensor,
        *,
        key_lengths: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
        rows: Rows | None = None,
    ) -> Tensor:
        """Attention of x with itself and, given a cache, with the tokens in it, to which x is appended. A cache keeps no graph:
        with one, call it under torch.no_grad().

        Args:
            x: (B, T, d_model).
            key_lengths: (B,) integers; tokens from there on are hidden. Not together with a cache.
            mask: as in `attention`. Not together with a cache.
            cache: of this layer, for the key heads of this rank; the T tokens continue its sequences.
            rows: how many of the last tokens of each sequence are real, as in `Cache.append`.

        Returns:
            (B, T, d_model); what belongs to padding means nothing.

        Raises:
            ShapeError, DTypeError, UnsupportedError: as `attention` and `Cache.append`.
        """
        if cache is None:
            return super().forward(x, key_lengths=key_lengths, mask=mask)
        if key_lengths is not None or mask is not None:
            name = "mask" if key_lengths is None else "key_lengths"
            raise UnsupportedError(name, "a call with a cache", "the cache knows its lengths; use rows= for padding")
        placement, *heads = self.heads(x)
        q, k, v = (local(t) for t in (placement, *heads))  # a cache holds what lies on its rank
        if self.rotary:
            positions = next_positions(cache, q.shape[2], rows)
            q, k = rotate(q, positions), rotate(k, positions)
        cache.append(k.to(cache.dtype), v.to(cache.dtype), rows)
        call, _, _ = for_heads(self.call(), q, split_of(self.W_O), self.n_head, None, None)
        out = attend_cache(q.to(cache.dtype), cache, call).to(q.dtype)
        return self.merge_heads(placed(out, placement))


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another: W_O(attention(W_Q x, W_K context, W_V context)).

    Args:
        d_model: features of x.
        n_head, n_kv_head, bias, dropout, scale, softcap, sinks, backend: as in `SelfAttention`.
        d_context: features of the context; None means d_model.

    Raises:
        ShapeError: a size or setting is wrong.

    Source:
        arXiv 1706.03762, section 3.2.3.

    Example:
        >>> CrossAttention(32, 4, d_context=24)(torch.randn(2, 5, 32), torch.randn(2, 9, 24)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        d_model: int = 768,
        n_head: int = 12,
        n_kv_head: int | None = None,
        bias: bool = False,
        *,
        d_context: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        make_spec(scale=scale, softcap=softcap, dropout_p=dropout)
        self.d_model, self.n_head = d_model, n_head
        self.d_context = d_model if d_context is None else d_context
        self.n_kv_head = n_head if n_kv_head is None else n_kv_head
        self.head_dim = head_dim(d_model, n_head, self.n_kv_head)
        self.dropout, self.scale, self.softcap, self.backend = dropout, scale, softcap, backend
        self.W_Q = nn.Linear(d_model, n_head * self.head_dim, bias=bias)
        self.W_K = nn.Linear(self.d_context, self.n_kv_head * self.head_dim, bias=bias)
        self.W_V = nn.Linear(self.d_context, self.n_kv_head * self.head_dim, bias=bias)
        self.W_O = nn.Linear(n_head * self.head_dim, d_model, bias=bias)
        self.sinks = nn.Parameter(torch.zeros(n_head)) if sinks else None

    def forward(
        self, x: Tensor, context: Tensor, *, context_lengths: Tensor | None = None, mask: Mask | Tensor | None = None
    ) -> Tensor:
        """Attention of x to the context.

        Args:
            x: (B, M, d_model).
            context: (B, N, d_context), dtype and device of x.
            context_lengths: (B,) integers; rows of the context from there on are hidden.
            mask: as in `attention`.

        Returns:
            (B, M, d_model).

        Raises:
            ShapeError, DTypeError, UnsupportedError: as `attention`.
        """
        check_features("x", x, self.d_model)
        check_features("context", context, self.d_context)
        q, k, v = in_heads(self, x, context)
        dropout_p = self.dropout if self.training else 0.0
        call = Call(self.scale, None, self.softcap, self.sinks, dropout_p, self.backend)
        call, context_lengths, mask = for_heads(call, q, split_of(self.W_O), self.n_head, context_lengths, mask)
        out = placed(attend(q, k, v, False, call, context_lengths, mask), q)
        return self.W_O(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the feature pairs (i, i + D/2) by position · base^(-2i/D): rotary position embedding.

    Args:
        x: (B, H, T, D), D even.
        positions: (T,) or (B, T) integers.

    Returns:
        (B, H, T, D), in the dtype of x; q·k then depends on the difference of the positions alone.

    Source:
        arXiv 2104.09864, section 3.2.

    Example:
        >>> x = torch.randn(1, 1, 1, 8)
        >>> q, k = (rotate(x, torch.tensor([position])) for position in (7, 4))
        >>> torch.allclose((q * k).sum(), (rotate(x, torch.tensor([3])) * x).sum(), atol=1e-5)
        True
    """
    half, exact = x.shape[-1] // 2, torch.float64 if x.dtype == torch.float64 else torch.float32
    speeds = ROTARY_BASE ** (-torch.arange(half, dtype=exact, device=x.device) / half)
    angles = (positions.to(exact)[..., None] * speeds).unsqueeze(-3)
    cos, sin = replicated(angles.cos(), x), replicated(angles.sin(), x)
    first, second = x.to(exact).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def next_positions(cache: Cache, M: int, rows: Rows | None) -> Tensor:
    """Positions that the next M tokens get, as (batch, M); padding in front of a sequence gets 0."""
    new = M if rows is None else rows_tensor(rows, cache.lengths.device)
    positions = (cache.lengths + new)[:, None] + torch.arange(-M, 0, device=cache.lengths.device)
    return positions.clamp_min(0)


def in_heads(module: SelfAttention | CrossAttention, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A module's queries of x, keys and values of a context, as (B, heads, T, head_dim).

    Raises:
        ShapeError: the projections, split over ranks, give no whole heads.
    """
    split = split_of(module.W_O)
    kv_heads_here(module.n_kv_head, split)  # first, and alike on all ranks: none must wait for one that has failed
    q, k, v = (split_heads(t, module.head_dim) for t in (module.W_Q(x), module.W_K(context), module.W_V(context)))
    check_heads(q, k, module.n_head, module.n_kv_head)
    return q, k, v


def split_heads(x: Tensor, features: int) -> Tensor:
    """(B, T, heads · features) as (B, heads, T, features), a view; how many heads there are is what x says.

    Raises:
        ShapeError: x holds no whole heads.
    """
    if x.shape[-1] % features:
        raise ShapeError(
            f"a projection gives {x.shape[-1]} features; wanted a multiple of {features}, the head dim; "
            "split the module over ranks that divide n_kv_head"
        )
    return x.unflatten(-1, (-1, features)).transpose(1, 2)


def head_dim(d_model: int, n_head: int, n_kv_head: int) -> int:
    """Features per head, checked.

    Raises:
        ShapeError: the heads do not divide d_model, or the key heads the heads.
        DTypeError: a size is no int.
    """
    for name, size in (("d_model", d_model), ("n_head", n_head), ("n_kv_head", n_kv_head)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise DTypeError(f"{name} is a {type(size).__name__}; wanted an int; pass int({name})")
        if size < 1:
            raise ShapeError(f"{name} is {size}; wanted at least 1; leave it out for its default")
    if d_model % n_head:
        raise ShapeError(
            f"d_model is {d_model}, which {n_head} heads do not divide; wanted a multiple of n_head; change one of them"
        )
    if n_head % n_kv_head:
        raise ShapeError(f"n_kv_head is {n_kv_head}; n_head is {n_head}, which is no multiple of it; pass a divisor of n_head")
    return d_model // n_head


def check_features(name: str, x: Tensor, features: int) -> None:
    """Fail unless x is (B, T, features)."""
    if x.dim() != 3 or x.shape[2] != features:
        wanted = f"(B, T, {features})"
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; wanted {wanted}; the module was made for {features} features")
