"""torch's own function under its own name: signature, semantics and results of torch.nn.functional."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

from andrea_triton import ShapeError, scaled_dot_product_attention
from andrea_triton.testing import assert_accurate

F32, F64 = torch.float32, torch.float64
INF = float("inf")


def same_as_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Ours, judged with its gradients by torch's in fp64; the yardstick is torch's in the same dtype, in the four dims that its
    fused attention wants."""
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    float_mask = attn_mask is not None and attn_mask.is_floating_point()

    def results(function: Any, dtype: torch.dtype, gradient: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (query, key, value))
        mask = attn_mask.detach().to(dtype).requires_grad_() if float_mask and attn_mask is not None else attn_mask
        out = function(q, k, v, mask, **settings)
        learned = [q, k, v, *([mask] if float_mask and isinstance(mask, Tensor) else [])]
        dout = torch.randn_like(out, dtype=F64) if gradient is None else gradient
        return out.detach(), *torch.autograd.grad(out, learned, dout.to(dtype)), dout

    def in_four_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **keywords: Any) -> Tensor:
        missing = max(0, 4 - q.dim())
        out = torchs(*(x[(None,) * missing] for x in (q, k, v)), mask, **keywords)
        return out.reshape(out.shape[missing:])

    *exact, dout = results(torchs, F64, None)
    eager, got = results(in_four_dims, query.dtype, dout)[:-1], results(scaled_dot_product_attention, query.dtype, dout)[:-1]
    for name, x, near, far in zip(("out", "dq", "dk", "dv", "dmask"), got, eager, exact, strict=False):
        assert x.dtype == query.dtype
        assert_accurate(x, near, far, query.dtype, name)
    return got[0]


def test_the_signature_is_torchs() -> None:
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("query", inspect.Parameter.empty), ("key", inspect.Parameter.empty), ("value", inspect.Parameter.empty),
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False),
    ]  # fmt: skip


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_rank(lead: tuple[int, ...], is_causal: bool) -> None:
    q, k, v = (torch.randn(*lead, n, 16) for n in (9, 12, 12))
    assert same_as_torch(q, k, v, is_causal=is_causal).shape == (*lead, 9, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F64])
def test_every_dtype(dtype: torch.dtype) -> None:
    if dtype == F64:
        q, k, v = (torch.randn(2, 3, 9, 16, dtype=F64) for _ in range(3))
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v), torchs(q, k, v))
    else:
        same_as_torch(*(torch.randn(2, 3, 9, 16).to(dtype) for _ in range(3)), is_causal=True)


def test_c05_c06_causal_is_top_left() -> None:
    one, five = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 5, 8)
    assert torch.equal(scaled_dot_product_attention(one, five, five, is_causal=True), five[:, :, :1])
    out = scaled_dot_product_attention(five, five[:, :, :2], five[:, :, :2], is_causal=True)
    assert torch.equal(out[:, :, 0], five[:, :, 0])
    same_as_torch(five, five[:, :, :2], five[:, :, :2], is_causal=True)


@pytest.mark.parametrize("shape", [(9, 12), (1, 12), (9, 1), (3, 9, 12), (2, 3, 9, 12), (2, 1, 1, 12), (1, 3, 9, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(kind: str, shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(2, 3, n, 16) for n in (9, 12, 12))
    mask = torch.randn(shape)
    if kind == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
    same_as_torch(q, k, v, mask)


def test_masks_of_rank_five() -> None:
    q, k, v = (torch.randn(2, 2, 3, n, 16) for n in (9, 12, 12))
    for shape in ((9, 12), (2, 1, 3, 9, 12), (2, 2, 1, 1, 12), (1, 2, 3, 9, 1)):
        same_as_torch(q, k, v, torch.randn(shape))


def test_float_masks_hide_with_minus_infinity() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    mask = torch.zeros(8, 8).masked_fill(torch.rand(8, 8) > 0.6, -INF)
    mask[:, 0] = 0.0
    same_as_torch(q, k, v, mask)
    mask[3] = -INF
    out = scaled_dot_product_attention(q, k, v, mask)
    assert (out[:, :, 3] == 0).all() and out.isfinite().all()


def test_scale() -> None:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    same_as_torch(q, k, v, scale=0.3)
    same_as_torch(q, k, v, scale=0.3, attn_mask=torch.randn(8, 8))


def test_gqa() -> None:
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    same_as_torch(q, k, v, enable_gqa=True)
    same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    with pytest.raises(ShapeError, match="key has 2 heads; query has 6; wanted as many, or pass enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def test_leading_dims_broadcast() -> None:
    q, k, v = torch.randn(2, 3, 9, 16), torch.randn(1, 3, 12, 16), torch.randn(2, 1, 12, 16)
    full = scaled_dot_product_attention(q, k.expand(2, 3, 12, 16), v.expand(2, 3, 12, 16))
    assert torch.equal(scaled_dot_product_attention(q, k, v), full)


def test_values_may_be_wider() -> None:
    q, k, v = torch.randn(2, 3, 9, 16), torch.randn(2, 3, 12, 16), torch.randn(2, 3, 12, 24)
    assert same_as_torch(q, k, v).shape == (2, 3, 9, 24)


def test_dropout_is_drawn_from_torchs_generator() -> None:
    q, k = torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16)
    v = torch.eye(32).expand(1, 2, 32, 32)
    torch.manual_seed(5)
    first, second = (scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert torch.equal(first.unique(), torch.tensor([0.0, 2 / 32]))


def test_refuses_what_torch_refuses() -> None:
    x, mask = torch.randn(1, 2, 8, 16), torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(ShapeError, match="attn_mask and is_causal=True came together; wanted one of them"):
        scaled_dot_product_attention(x, x, x, mask, is_causal=True)
    with pytest.raises(ShapeError, match=r"query has 1 dims; wanted \(..., H, L, E\); unsqueeze it"):
        scaled_dot_product_attention(x[0, 0, 0], x, x)
