"""torch's own function under its own name: signature, semantics and results of torch.nn.functional."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import bias as torch_bias
from torch.nn.functional import scaled_dot_product_attention as torchs

from andrea_triton import DTypeError, ShapeError, scaled_dot_product_attention
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
    with pytest.raises(ShapeError, match="have 6, 2 and 2 heads; wanted as many, or 1; pass enable_gqa=True"):
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
    with pytest.raises(ShapeError, match="wanted leading dims that broadcast"):
        scaled_dot_product_attention(x.expand(3, 2, 8, 16), x.expand(2, 2, 8, 16), x)
    with pytest.raises(DTypeError, match=r"attn_mask is torch.float64; wanted .* or torch.float16, as query"):
        scaled_dot_product_attention(x.half(), x.half(), x.half(), mask.double())
    for scale, message in ((torch.ones(1), "wanted a number or a tensor of no dims"), (learned(()), "requires a gradient")):
        with pytest.raises(DTypeError, match=message):
            scaled_dot_product_attention(x, x, x, scale=scale)


def learned(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, requires_grad=True)


SHAPES: list[tuple[tuple[int, ...], ...]] = [
    ((0, 1, 8),) * 3, ((2, 3, 0),) * 3, ((4, 0),) * 3, ((2, 0, 4, 8),) * 3, ((2, 0, 3, 4, 8),) * 3,
    ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 6)), ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 0)),
    ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)), ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
    ((2, 1, 3, 4, 8), (3, 5, 8), (5, 8)), ((4, 8), (3, 5, 8), (3, 5, 8)), ((2, 2, 3, 4, 8), (1, 2, 1, 5, 8), (2, 1, 3, 5, 8)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_that_torch_takes(shapes: tuple[tuple[int, ...], ...], is_causal: bool) -> None:
    """Empty, broadcast, of no features: output and gradients have torch's shapes and values."""
    first = [learned(shape) for shape in shapes]
    found = []
    for function in (torchs, scaled_dot_product_attention):
        inputs = [x.detach().requires_grad_() for x in first]
        out = function(*inputs, is_causal=is_causal)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("sizes", [(6, 10), (10, 6), (6, 6), (1, 5)], ids=str)
@pytest.mark.parametrize("corner", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
def test_d04_causal_bias(corner: str, sizes: tuple[int, int]) -> None:
    """torch's class has memory that nobody wrote: it stands for a band."""
    bias = getattr(torch_bias, corner)(*sizes)
    q, k, v = (torch.randn(2, 3, n, 16) for n in (sizes[0], sizes[1], sizes[1]))
    wanted = torchs(q, k, v, attn_mask=bias)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, bias), wanted)
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    if sizes == (6, 10):
        torch.testing.assert_close(compiled(q, k, v, bias), wanted)
    with pytest.raises(ShapeError, match="attn_mask and is_causal=True"):
        scaled_dot_product_attention(q, k, v, bias, is_causal=True)


def test_causal_bias_of_other_sizes() -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 10, 8)
    upper = torch_bias.causal_upper_left(3, 4)  # torch reads no size of it
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, upper), torchs(q, k, k, upper))
    with pytest.raises(ShapeError, match=r"attn_mask is causal_lower_right\(3, 4\); wanted 6 queries and 10 keys"):
        scaled_dot_product_attention(q, k, k, torch_bias.causal_lower_right(3, 4))


def test_numbers_that_torch_takes() -> None:
    x = torch.randn(1, 2, 5, 8)
    wanted = torchs(x, x, x, scale=0.5)
    for scale in (torch.tensor(0.5), np.float32(0.5), np.float64(0.5)):
        torch.testing.assert_close(scaled_dot_product_attention(x, x, x, scale=scale), wanted)  # type: ignore[arg-type]
    assert torch.equal(scaled_dot_product_attention(x, x, x, dropout_p=1.0), torch.zeros_like(x))


def test_key_and_value_may_have_groups_of_their_own() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 1, 6, 8)
    same_as_torch(q, k, v, enable_gqa=True)
    with pytest.raises(ShapeError, match="have 4, 2 and 3 heads; wanted divisors of the query's"):
        scaled_dot_product_attention(q, k, torch.randn(1, 3, 6, 8), enable_gqa=True)
