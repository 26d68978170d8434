"""Every tensor that a call is given beside q, k, v: read with any strides, kept by autograd like q, k, v until the backward."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from andrea_triton import Score, attention, causal_attention, varlen_attention
from tests.backends import there
from tests.side_tensors import DENSE, KEEP, PACKED, STARTS, B, H, call, grads, qkv

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def from_table(score, batch, head, q_pos, k_pos, table):  # type: ignore[no-untyped-def]
    return score + tl.load(table + tl.abs(q_pos - k_pos) % 3)


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    pass
else:
    from_table = triton.jit(from_table)


def poisoned(t: Tensor, size: list[int]) -> Tensor:
    """Room full of what would show if it was read."""
    if t.dtype == torch.bool:
        return torch.ones(size, dtype=torch.bool)
    return torch.full(size, float("nan") if t.is_floating_point() else 10**6, dtype=t.dtype)


def column(t: Tensor) -> Tensor:
    """The values as a column of a wider tensor."""
    room = poisoned(t, [*t.shape, 3])
    room[..., 1] = t
    return room[..., 1]


def stepped(t: Tensor) -> Tensor:
    """The values at every second place of every dim."""
    room = poisoned(t, [2 * n for n in t.shape])
    view = room[tuple(slice(None, None, 2) for _ in t.shape)]
    return view.copy_(t)


def same(t: Tensor) -> Tensor:
    """The first value for all, at stride 0."""
    return t.flatten()[0].expand(t.shape) if t.dtype != torch.int32 or t.shape != STARTS.shape else column(t)


STRIDES: list[Callable[[Tensor], Tensor]] = [column, stepped, same]


@pytest.mark.parametrize("name", [*DENSE, *PACKED])
@pytest.mark.parametrize("layout", STRIDES, ids=lambda f: f.__name__)
def test_side_tensors_are_read_with_their_strides(name: str, layout: Callable[[Tensor], Tensor], backend: str) -> None:
    """D01, D02, D03: bits as of a contiguous copy."""
    values = there({**DENSE, **PACKED}[name])
    strided = layout(values)
    inputs = qkv(name in PACKED)
    for got, wanted in zip(
        grads(inputs, backend, **{name: strided}), grads(inputs, backend, **{name: strided.contiguous()}), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_sinks_of_every_dtype_and_stride(dtype: torch.dtype, backend: str) -> None:
    inputs = qkv(dtype=dtype)
    for sinks in (there(DENSE["sinks"]).to(dtype), there(DENSE["sinks"]).double()):
        learned = column(sinks).requires_grad_()
        plain = sinks.clone().requires_grad_()
        found = [torch.autograd.grad(call(inputs, backend, sinks=x).float().sum(), x)[0] for x in (learned, plain)]
        assert torch.equal(*found)


def test_lengths_expanded_from_one_number(backend: str) -> None:
    """D01, to the letter."""
    q = torch.zeros(2, 1, 2, 16)
    v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1).expand(2, 1, 2, 16)
    out: Any = attention(q, q, v, key_lengths=torch.tensor([1], dtype=torch.int32).expand(2), backend=backend)
    assert out[:, 0, 0, 0].tolist() == [1.0, 1.0]


def test_starts_as_a_column(backend: str) -> None:
    """D02, to the letter."""
    starts = torch.tensor([[0, 9], [2, 9], [4, 9]], dtype=torch.int32)[:, 0]
    q = torch.zeros(4, 1, 16)
    v = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1).expand(4, 1, 16)
    out: Any = varlen_attention(q, q, v, starts, starts, 2, 2, backend=backend)
    assert out[:, 0, 0].tolist() == [1.5, 1.5, 3.5, 3.5]


def change(t: Tensor) -> None:
    """Make it mean something else, in place."""
    with torch.no_grad():
        if t.dtype == torch.bool:
            t.logical_not_()
        elif t.shape == STARTS.shape and t.dtype == STARTS.dtype:
            t.copy_(torch.tensor([0, 4, 5]))
        else:
            t.add_(-1 if t.dtype == torch.int32 else 1)


@pytest.mark.parametrize("name", [*DENSE, *PACKED])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_changed_in_place_before_the_backward(name: str, compiled: bool, backend: str) -> None:
    """D05, D06, D07: the gradients of its own forward, or an error; never those of another mask."""
    values = there({**DENSE, **PACKED}[name])
    inputs, own = qkv(name in PACKED), values.clone()
    wanted = grads(inputs, backend, **{name: values})[1:]
    run: Any = call
    if compiled:  # the operators' way, as a graph takes it
        if backend == "reference":
            pytest.skip("the dense definition is torch's own operators, which torch's tests hold")
        torch._dynamo.reset()
        run = torch.compile(call, backend="aot_eager", fullgraph=True)
    out = run(inputs, backend, **{name: own})
    change(own)
    weight = torch.arange(out.numel(), dtype=F32).sin().view(out.shape)
    try:
        found = torch.autograd.grad((out * weight).sum(), inputs)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right)


def test_arguments_of_functions_changed_in_place(backend: str) -> None:
    """A table that a Score reads is kept like a mask."""
    table, inputs = torch.arange(3.0), qkv()
    score = Score(from_table, grad=1, args=(table,), torch_fn=lambda s, b, h, i, j, t: s + t[(i - j).abs() % 3])
    out = call(inputs, backend, score=score)
    table += 1
    if backend == "reference":
        return  # autograd's own formulas need no table again
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_seed_advanced_between_layers(backend: str) -> None:
    """D06: each layer's backward drops what its forward dropped."""
    inputs, seed = qkv(), torch.tensor([7])
    apart = [grads(inputs, backend, seed=torch.tensor([s]))[1:] for s in (7, 8)]
    outs = []
    for _ in range(2):
        outs.append(call(inputs, backend, seed=seed))
        seed += 1
    weight = torch.arange(outs[0].numel(), dtype=F32).sin().view(outs[0].shape)
    for out, wanted in zip(outs, apart, strict=True):
        for got, right in zip(torch.autograd.grad((out * weight).sum(), inputs), wanted, strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize("name", [*DENSE, *PACKED])
def test_saved_tensor_hooks_see_every_side_tensor(name: str, backend: str) -> None:
    """What is kept for the backward passes through autograd's hooks (offloading, checkpointing), in no more elements than the
    caller's tensor has."""
    if backend == "reference":
        return  # autograd's own formulas keep what they read
    values = there({**DENSE, **PACKED}[name])
    seen: list[tuple[torch.dtype, int]] = []

    def pack(t: Tensor) -> Tensor:
        seen.append((t.dtype, t.numel()))
        return t.clone()

    inputs = qkv(name in PACKED)
    wanted = grads(inputs, backend, **{name: values})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = grads(inputs, backend, **{name: values})
    assert any(dtype == values.dtype and size <= max(values.numel(), B * H) for dtype, size in seen)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_checkpointing_frees_bias_and_mask(backend: str) -> None:
    """D08: after the forward of four checkpointed layers none of their matrices is alive."""
    alive: list[weakref.ref[Tensor]] = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = (q.detach() @ k.detach().mT).mul(0.1)
        mask = bias < 0.3
        alive.extend((weakref.ref(bias), weakref.ref(mask)))
        out: Any = causal_attention(q, k, v, bias=bias, mask=mask, backend=backend)
        return out

    q, k, v = qkv()
    out = q
    for _ in range(4):
        out = checkpoint(layer, out, k, v, use_reentrant=False)
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    out.sum().backward()


def test_the_graph_frees_side_tensors(backend: str) -> None:
    """With the results go the tensors that the backward would have read."""
    mask = there(KEEP).clone()
    out = call(qkv(), backend, mask=mask)
    ref = weakref.ref(mask)
    del mask, out
    gc.collect()
    assert ref() is None
