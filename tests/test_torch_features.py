"""The contract inside torch's own features: transforms, many gradients at once, autocast, copies, precision settings."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from andrea_triton import (
    DTypeError,
    Mask,
    Score,
    UnsupportedError,
    attention,
    causal_attention,
    scaled_dot_product_attention,
    varlen_attention,
)
from tests.backends import here, there
from tests.side_tensors import DENSE, KEEP, LENGTHS, STARTS, D, T, call, grads, qkv

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF = float("inf")


@pytest.mark.parametrize("batched", [("q", "key_lengths"), ("key_lengths",), ("mask",), ("q", "cu")])
def test_vmap_over_side_tensors(batched: tuple[str, ...], backend: str) -> None:
    """D20: as a loop over the entries."""
    packed = "cu" in batched
    q, k, v = (t.detach() for t in qkv(packed))
    lengths, keep, starts = there(LENGTHS), there(KEEP), there(STARTS)
    sides = [torch.stack(pair) for pair in ((lengths, lengths - 1), (keep, ~keep), (starts, torch.tensor([0, 3, 5]).int()))]

    def one(q: Tensor, lengths: Tensor, mask: Tensor, starts: Tensor) -> Any:
        if packed:
            return varlen_attention(q, k, v, starts, starts, T, T, causal=True, backend=backend)
        more = {"key_lengths": lengths} if "key_lengths" in batched else {"mask": mask}
        return attention(q, k, v, causal=True, backend=backend, **more)

    if packed and backend == "reference":
        pytest.skip("the dense definition reads where sequences start, which vmap cannot")
    many = torch.stack([q, 2 * q]) if "q" in batched else q
    found = torch.vmap(one, in_dims=(0 if "q" in batched else None, 0, 0, 0))(many, *sides)
    wanted = [one(many[i] if "q" in batched else q, *[side[i] for side in sides]) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(wanted))


@pytest.mark.parametrize("extra", ["key_lengths", "sinks", "mask function"])
def test_many_gradients_at_once(extra: str, backend: str) -> None:
    """D20: is_grads_batched, and jacobian(vectorize=True), as one by one."""
    more: dict[str, Any] = {"key_lengths": there(LENGTHS)} if extra == "key_lengths" else {}
    if extra == "sinks":
        more = {"sinks": there(DENSE["sinks"])}
    if extra == "mask function":
        more = {"mask": Mask(near, (2,), torch_fn=lambda b, h, i, j, n: (i - j) < n)}
    inputs = qkv()
    out = call(inputs, backend, **more)
    several = torch.stack([torch.ones_like(out), torch.arange(out.numel(), dtype=F32).view(out.shape).cos()])
    found = torch.autograd.grad(out, inputs, several, is_grads_batched=True, retain_graph=True)
    mapped = torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(several)
    for i, results in itertools.product(range(2), (found, mapped)):
        for got, wanted in zip(results, torch.autograd.grad(out, inputs, several[i], retain_graph=True), strict=True):
            torch.testing.assert_close(got[i], wanted)


def test_jacobian_of_a_row(backend: str) -> None:
    q, k, v = (t.detach()[:1, :1, :3, :2] for t in qkv())
    function = lambda q: causal_attention(q, k, v, backend=backend)  # noqa: E731
    fast, slow = (torch.autograd.functional.jacobian(function, q, vectorize=way) for way in (True, False))
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("seed", [2**63, -(2**63)])
@pytest.mark.parametrize("way", ["compile", "vmap", "numpy"])
def test_seeds_of_64_bits(seed: int, way: str, backend: str) -> None:
    """D18: the same bits of the seed, whatever carries it."""
    q, k, v = (t.detach() for t in qkv())
    wanted: Any = attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend)
    if way == "numpy":
        found: Any = attention(q, k, v, dropout_p=0.4, seed=np.uint64(seed % 2**64), backend=backend)  # type: ignore[arg-type]
    elif way == "vmap":
        found = torch.vmap(lambda q: attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend))(q[None])[0]
    else:
        run: Any = torch.compile(lambda q: attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend), backend="aot_eager")
        found = run(q)
    torch.testing.assert_close(found, wanted)
    other: Any = attention(q, k, v, dropout_p=0.4, seed=seed - 1 if seed > 0 else seed + 1, backend=backend)
    assert not torch.equal(other, wanted)


def test_an_infinite_sink_takes_all(backend: str) -> None:
    """D17: the limit, out 0, lse inf, and gradients 0 but the sink's own through lse."""
    for dtype in (F32, F16, F64):
        inputs = qkv(dtype=dtype)
        sinks = torch.tensor([INF, 0.5], dtype=dtype, requires_grad=True)
        out, lse, _, entropy = attention(*inputs, causal=True, sinks=sinks, return_lse=True, return_stats=True, backend=backend)
        assert (out[:, 0] == 0).all()
        assert (lse[:, 0] == INF).all()
        assert entropy.isfinite().all()
        found = torch.autograd.grad(out.sum(), [*inputs, sinks])
        assert all(t.isfinite().all() for t in found)
        assert (found[0][:, 0] == 0).all()
        assert found[3][0] == 0


@pytest.mark.parametrize(
    "function",
    [
        causal_attention,
        scaled_dot_product_attention,
        lambda q, k, v: causal_attention(q, k, v, scale=0.3, softcap=2.0),
        lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.3),
    ],
)
def test_two_checkpointed_calls_compile_with_dynamic_lengths(function: Any) -> None:
    """D19: Dynamo loses a float that is a default argument, or stands in a module, between the subgraphs of two checkpoints."""

    def two(q: Tensor, k: Tensor, v: Tensor) -> Any:
        for _ in range(2):
            q = checkpoint(lambda q, k, v: function(q, k, v), q, k, v, use_reentrant=False)
        return q

    torch._dynamo.reset()
    compiled: Any = torch.compile(two, dynamic=True, fullgraph=True, backend="aot_eager")
    for length in (5, 9):
        inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        found, wanted = (torch.autograd.grad(f(*inputs).sum(), inputs) for f in (compiled, two))
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8), (1, 0, 5, 8)])
def test_gradients_of_nothing_are_zeros(shape: tuple[int, ...], backend: str) -> None:
    """D42: as torch's own, of the tensor's shape."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 1, 1, requires_grad=True)
    out: Any = attention(q, k, v, bias=bias, backend=backend)
    out.sum().backward()
    for t in (q, k, v, bias):
        assert t.grad is not None
        assert t.grad.shape == t.shape
        assert (t.grad == 0).all()


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_autocast_takes_the_other_16_bit_dtype(name: str, backend: str) -> None:
    """D30: bias and sinks come along, as torch's own attention has its mask."""
    inputs, value = qkv(), there(DENSE[name]).to(F16).requires_grad_()
    with torch.autocast(here().type, BF16):
        out = call(inputs, backend, **{name: value})
    assert out.dtype == BF16
    assert torch.autograd.grad(out.float().sum(), value)[0].dtype == F16
    with pytest.raises(DTypeError, match="float16"):
        call(qkv(dtype=BF16), backend, **{name: value})


@pytest.mark.parametrize("features", [(0, 8), (8, 0), (0, 0), (320, 8), (8, 512)])
def test_head_dims_beyond_the_kernels(features: tuple[int, int], backend: str) -> None:
    """D41, D43: any on the backends of torch; the kernels say which way leads on."""
    q, k = (torch.randn(1, 2, 3, features[0], requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 3, features[1], requires_grad=True)
    if backend in ("interpreter", "triton"):
        with pytest.raises(UnsupportedError, match="backend='torch', which takes any"):
            attention(q, k, v, backend=backend)
        return
    out: Any = attention(q, k, v, causal=True, backend=backend)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, wanted)
    found, right = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, wanted))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [np.int64(5), torch.tensor(5), np.int32(9)], ids=str)
def test_lengths_as_numbers_of_other_kinds(length: Any) -> None:
    """D31: whatever stands for an integer."""
    inputs = qkv(True)
    assert torch.equal(call(inputs, "torch", max_q=length, max_k=length), call(inputs, "torch"))


def test_a_scale_with_a_gradient_is_not_dropped() -> None:
    with pytest.raises(DTypeError, match="multiply q by it"):
        attention(*qkv(), scale=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]


def near(batch, head, q_pos, k_pos, size):  # type: ignore[no-untyped-def]
    return q_pos - k_pos < size


def double(score, batch, head, q_pos, k_pos):  # type: ignore[no-untyped-def]
    return score * 2


def nearer(score, batch, head, q_pos, k_pos, rate):  # type: ignore[no-untyped-def]
    return score - rate * (q_pos - k_pos)


def twice(score: Tensor, *_: Any) -> Tensor:
    return 2 * score


def shifted(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor, rate: float) -> Tensor:
    return score - rate * (q_pos - k_pos)


def seen(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor, size: int) -> Tensor:
    return q_pos - k_pos < size


try:
    import triton
except ModuleNotFoundError:
    pass
else:
    near, double, nearer = (triton.jit(f) for f in (near, double, nearer))


def test_a_score_without_grad_means_the_same_everywhere(backend: str) -> None:
    """D16: the derivative is that of torch_fn, on every backend; grad=1 says that fn only adds."""
    for score, factor in [(Score(double, torch_fn=twice), 2), (Score(nearer, args=(0.3,), torch_fn=shifted), 1)]:
        inputs = qkv()
        found = grads(inputs, backend, score=score)
        wanted = grads(inputs, "reference", score=score)
        for got, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, right)
        if factor == 1:
            for got, right in zip(grads(inputs, backend, score=score._replace(grad=1)), wanted, strict=True):
                torch.testing.assert_close(got, right)
    with pytest.raises(UnsupportedError, match="torch_fn"):
        grads(inputs, backend, score=Score(double))


def test_a_score_table_with_a_gradient_is_refused(backend: str) -> None:
    """D15: a gradient that nobody makes is an error, and no error where none is asked for."""
    table = torch.randn(3, requires_grad=True)
    score = Score(nearer, args=(table,), torch_fn=lambda s, b, h, i, j, t: s + t[0])
    with pytest.raises(UnsupportedError, match=r"score\.args that requires a gradient.*detached"):
        call(qkv(), backend, score=score)
    with torch.no_grad():
        call(qkv(), "torch", score=score)


class Holder(torch.nn.Module):
    """A module that holds a Score and a Mask, as a user's might."""

    def __init__(self) -> None:
        super().__init__()
        self.score = Score(nearer, grad=1, args=(0.25,), torch_fn=shifted)
        self.mask = Mask(near, (torch.tensor(3),), torch_fn=seen)
        self.W = torch.nn.Linear(D, D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return causal_attention(self.W(q), k, v, score=self.score, mask=self.mask)


def loaded(holder: Holder) -> Any:
    buffer = io.BytesIO()
    torch.save(holder, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, loaded, lambda x: pickle.loads(pickle.dumps(x))])
def test_modules_with_functions_are_copied(copied: Callable[[Holder], Holder], monkeypatch: pytest.MonkeyPatch) -> None:
    """D21: deepcopy, pickle and torch.save, and the copy computes the same."""
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))
    holder, inputs = Holder(), qkv()
    other = copied(holder)
    assert torch.equal(other(*inputs), holder(*inputs))
    assert other.score.fn is nearer


def test_a_local_function_is_copied_but_not_pickled() -> None:
    mask = Mask(None, torch_fn=lambda b, h, i, j: i >= j)
    assert copy.deepcopy(mask) == mask
    with pytest.raises(pickle.PicklingError, match="wanted a function at the top level of a module"):
        pickle.dumps(mask)


@pytest.mark.parametrize("setting", list(itertools.product(["all", "matmul"], ["tf32", "ieee"])))
def test_either_way_to_ask_for_tf32(setting: tuple[str, str], backend: str) -> None:
    """D24: torch's newer setting is honoured, and asking for it fails no call."""
    from andrea_triton import target

    place: Any = torch.backends if setting[0] == "all" else torch.backends.cuda.matmul
    before = place.fp32_precision
    try:
        place.fp32_precision = setting[1]
        assert target.float32_precision() == setting[1]
        grads(qkv(), backend)
    finally:
        place.fp32_precision = before
    assert target.float32_precision() == "fastest"
