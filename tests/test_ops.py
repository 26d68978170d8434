"""The autograd Function and the operators: graphs, transforms, modes, and every way to ask for gradients."""

import itertools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from andrea_triton import DTypeError, UnsupportedError, attention, ops, varlen_attention
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case, Inputs, assert_accurate, attend_reference, cast, make_inputs, run
from tests.backends import BACKENDS, here

# Dynamo makes an instance of every autograd Function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CASES = [
    Case("plain", HQ=1, M=9, N=12, D=16, DV=8, causal=True),
    Case("grouped rows", HQ=4, HKV=2, M=9, D=16, layout="rows", window=5),
    Case("terms", HQ=2, M=9, D=16, bias=(1, 9, 9), sinks=True, softcap=2.0, dropout_p=0.3, alibi=True, hidden=0.3),
    Case("lengths", B=2, HQ=1, M=9, D=16, key_lengths=(0, 7)),
    Case("packed", HQ=2, D=16, lengths_q=(5, 0, 3), lengths_k=(4, 2, 3), slack=2, causal=True, sinks=True),
]

# What opcheck looks at is the operator, one for all backends: the kernels take the cases whose arguments differ most.
CHECKED = [
    pytest.param(
        *(backend, case),
        id=f"{backend}-{case.name}",
        marks=[pytest.mark.slow] * (backend == "interpreter" and case.name not in ("plain", "packed")),
    )
    for backend in BACKENDS
    for case in CASES
]


def by(backend: str, **more: Any) -> Any:
    """(out, lse) of Inputs, dense or packed, by a backend."""

    def attend(x: Inputs) -> tuple[Tensor, Tensor]:
        settings = {**x.settings, **x.extras, **more, "return_lse": True, "backend": backend}
        function: Any = varlen_attention if "max_q" in settings else attention
        return function(x.q, x.k, x.v, **settings)

    return attend


def parts(case: Case, backend: str, dtype: torch.dtype = F32) -> tuple[tuple[Any, ...], Inputs]:
    """Arguments of the forward operator, q, k, v, bias and sinks with gradient."""
    inputs = make_inputs(case, dtype)
    extras = {n: x.requires_grad_() if n in ("bias", "sinks") else x for n, x in inputs.extras.items()}
    q, k, v = (x.requires_grad_() for x in inputs[:3])
    problem = make_problem(q, k, v, make_spec(**inputs.settings), **extras)
    tensors, numbers = ops.take_apart(problem, extras.get("bias"), backend)
    return (q, k, v, *tensors, *numbers), inputs


def same(a: Any, b: Any) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("backend", "case"), CHECKED)
def test_opcheck_forward(backend: str, case: Case) -> None:
    torch.library.opcheck(ops.forward_op, parts(case, backend)[0])


@pytest.mark.parametrize(("backend", "case"), CHECKED)
def test_opcheck_backward(backend: str, case: Case) -> None:
    arguments, inputs = parts(case, backend)
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    saved = ops.forward_op(*arguments)
    needs = [t is not None for t in arguments[:5]]
    some = ((inputs.dout, inputs.dlse), (inputs.dout, None), (None, inputs.dlse))
    # What is missing is the operator's business, not the backend's: the kernels show it once.
    for dout, dlse in some[: 1 if case.bias or (backend == "interpreter" and case.name != "plain") else 3]:
        torch.library.opcheck(ops.backward_op, (dout, dlse, *saved, needs, *arguments))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_give_what_the_eager_way_gives(backend: str, case: Case) -> None:
    (arguments, inputs), eager = parts(case, backend), run(make_inputs(case, F32), by(backend))
    out, lse, _row_max, _row_sum = ops.forward_op(*arguments)
    assert torch.equal(out, eager.out) and torch.equal(lse, eager.lse)
    learned = [t for t in arguments[:5] if t is not None]
    grads = torch.autograd.grad((out, lse), learned, (inputs.dout, inputs.dlse))
    assert same(grads, [g for g in eager[2:] if g is not None])


@pytest.mark.parametrize(("backend", "case"), CHECKED)
def test_compiled_is_eager(backend: str, case: Case) -> None:
    torch._dynamo.reset()
    inputs, eager = make_inputs(case, F32), run(make_inputs(case, F32), by(backend))
    assert same(run(inputs, torch.compile(by(backend), fullgraph=True, backend="aot_eager")), eager)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_by_inductor_is_eager(backend: str) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(CASES[0], F32)
    eager = run(inputs, by(backend))
    assert same(run(inputs, torch.compile(by(backend), fullgraph=True)), eager)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_graph_keeps_the_operator(backend: str) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    inputs = make_inputs(CASES[0], F32)
    run(inputs, torch.compile(by(backend), fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)))
    names = [[str(n.target) for n in graph.graph.nodes if n.op == "call_function"] for graph in graphs]
    assert len(names) == 2 and "andrea_triton.forward.default" in names[0] and "andrea_triton.backward.default" in names[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c43_one_compilation_for_every_length(backend: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True, backend=backend), fullgraph=True, backend=counter)
    for T in (100, 33, 65, 2, 128) if backend == "torch" else (30, 13, 17, 5, 36):
        q, k, v = (torch.randn(1, 2, T, 16).requires_grad_() for _ in range(3))
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 2)
        out, eager = compiled(q, k, v), attention(q, k, v, causal=True, backend=backend)
        assert torch.equal(out, eager)
        assert same(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(eager.sum(), (q, k, v)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_export(backend: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention(q, k, v, causal=True, backend=backend)

    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    exported = torch.export.export(Block(), (q, k, v))
    assert torch.equal(exported.module()(q, k, v), Block()(q, k, v))
    assert "andrea_triton.forward" in str(exported.graph)


@pytest.mark.parametrize("backend", BACKENDS)
def test_export_for_every_length(backend: str) -> None:
    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention(q, k, v, causal=True, backend=backend)

    length = {2: torch.export.Dim("T", min=2, max=64)}
    exported = torch.export.export(Block(), tuple(torch.randn(1, 2, 9, 16) for _ in range(3)), dynamic_shapes=(length,) * 3)
    for T in (2, 31):
        q, k, v = (torch.randn(1, 2, T, 16) for _ in range(3))
        assert torch.equal(exported.module()(q, k, v), Block()(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_of_starts_for_queries_and_keys_compiles(backend: str) -> None:
    torch._dynamo.reset()
    leaves, starts = [torch.randn(9, 2, 8).requires_grad_() for _ in range(3)], torch.tensor([0, 4, 9], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        return varlen_attention(q, k, v, starts, starts, 5, 5, causal=True, backend=backend)

    out, eager = torch.compile(packed, fullgraph=True, backend="aot_eager")(*leaves, starts), packed(*leaves, starts)
    assert torch.equal(out, eager)
    assert same(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(eager.sum(), leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    wanted = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    with torch.inference_mode():
        own = [x.clone() for x in (q, k, v)]
        assert all(x.is_inference() for x in own)
        for tensors in ((q, k, v), own):
            assert same(attention(*tensors, causal=True, return_lse=True, backend=backend), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_jacobians(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=F64) for _ in range(3))
    wanted = torch.func.jacrev(lambda x: attention(x, k, v, causal=True, backend="reference"))(q)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(jacobian(lambda x: attention(x, k, v, causal=True, backend=backend))(q), wanted)


def loss(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
    out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
    return out.square().sum() + lse.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_transforms(backend: str) -> None:
    """grad, vmap, vmap of grad, and a vmap over one argument alone."""
    q, k, v = (torch.randn(3, 1, 2, 8, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(sum(loss(*(x[i] for x in leaves), backend) for i in range(3)), leaves)
    grad = torch.func.grad(lambda *x: loss(*x, backend), argnums=(0, 1, 2))
    assert same(grad(q[0], k[0], v[0]), [g[0] for g in wanted])
    assert same(torch.vmap(grad)(q, k, v), wanted)
    out = torch.vmap(lambda a, b, c: attention(a, b, c, backend=backend))(q, k, v)
    assert same(out, [attention(q[i], k[i], v[i], backend=backend) for i in range(3)])
    shared = torch.vmap(lambda a: attention(a, k[0], v[0], backend=backend))(q)
    assert same(shared, [attention(q[i], k[0], v[0], backend=backend) for i in range(3)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_c33_double_backward_is_right(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 4, dtype=F64).requires_grad_() for _ in range(3))
    bias, sinks = torch.randn(5, 5, dtype=F64).requires_grad_(), torch.randn(1, dtype=F64).requires_grad_()

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return attention(q, k, v, causal=True, bias=bias, sinks=sinks, return_lse=True, backend=backend)

    assert torch.autograd.gradgradcheck(function, (q, k, v, bias, sinks), fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c33_double_backward_in_a_transform_says_so(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 8, 8) for _ in range(3))
    with pytest.raises(UnsupportedError, match=r"double backward is not supported by .*create_graph=True"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: loss(y, k, v, backend))(x).sum())(q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c33_forward_mode_is_right(backend: str) -> None:
    tensors = [torch.randn(1, 1, 8, 8, dtype=F64) for _ in range(6)]
    got = torch.func.jvp(lambda *x: attention(*x, causal=True, backend=backend), tuple(tensors[:3]), tuple(tensors[3:]))
    wanted = torch.func.jvp(lambda *x: attention(*x, causal=True, backend="reference"), tuple(tensors[:3]), tuple(tensors[3:]))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_c41_checkpoint_replays_the_dropout(backend: str, seed: int | None) -> None:
    q, k, v = (torch.randn(1, 2, 9, 16).requires_grad_() for _ in range(3))

    def block(*x: Tensor) -> Any:
        return attention(*x, causal=True, dropout_p=0.4, seed=seed, backend=backend)

    results = []
    for function in (block, lambda *x: checkpoint(block, *x, use_reentrant=False)):
        torch.manual_seed(1)
        out = function(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert same(*results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fake_and_meta_tensors(backend: str) -> None:
    for case in (CASES[0], CASES[1]):
        x, wanted = make_inputs(case, BF16), run(make_inputs(case, BF16), by(backend))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t).requires_grad_() for t in x[:3]]
            out, lse = attention(*fake, return_lse=True, backend=backend, **x.settings)
            grads = torch.autograd.grad((out, lse), fake, (torch.zeros_like(out), torch.zeros_like(lse)))
        found = [(t.shape, t.dtype) for t in (out, lse, *grads)]
        assert found == [(t.shape, t.dtype) for t in wanted[:5]]
    q = torch.empty(2, 3, 100_000, 64, dtype=BF16, device="meta")
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    assert (out.shape, out.dtype, out.device.type, lse.shape, lse.dtype) == (q.shape, BF16, "meta", q.shape[:3], F32)


SUBSETS = [s for s in itertools.product([False, True], repeat=5) if any(s)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_c25_every_subset_of_gradients(backend: str) -> None:
    case = Case("subsets", HQ=1, M=5, D=8, bias=(5, 5), sinks=True)
    inputs = make_inputs(case, F32)
    tensors = dict(q=inputs.q, k=inputs.k, v=inputs.v, **inputs.extras)
    whole = run(inputs, by(backend))[2:]
    for subset in SUBSETS:
        leaves = {n: x.clone().requires_grad_(wants) for (n, x), wants in zip(tensors.items(), subset, strict=True)}
        out, lse = attention(**leaves, return_lse=True, backend=backend)
        torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
        for leaf, wanted in zip(leaves.values(), whole, strict=True):
            assert leaf.grad is None if not leaf.requires_grad else torch.equal(leaf.grad, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_may_be_all_three(backend: str) -> None:
    x = torch.randn(1, 2, 9, 16, requires_grad=True)
    copies = [x.detach().clone().requires_grad_() for _ in range(3)]
    dq, dk, dv = torch.autograd.grad(loss(*copies, backend), copies)
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: loss(y, y, y, backend), fullgraph=True, backend="aot_eager")
    for value in (loss(x, x, x, backend), compiled(x)):
        (grad,) = torch.autograd.grad(value, x)
        assert any(torch.equal(grad, a + b + c) for a, b, c in itertools.permutations((dq, dk, dv)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_c36_autocast(backend: str) -> None:
    q, k, v = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16).to(BF16)
    q.requires_grad_()
    with torch.autocast(here().type, BF16):
        out = attention(q, k, v, causal=True, backend=backend)
    assert out.dtype == BF16
    assert torch.equal(out, attention(q.to(BF16), k.to(BF16), v, causal=True, backend=backend))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.dtype == F32
    with pytest.raises(DTypeError, match=r"q is torch.float32, k is torch.float32, v is torch.bfloat16; .*torch.autocast"):
        attention(q, k, v, backend=backend)
    wide = q.detach().double()
    with torch.autocast(here().type, BF16):
        assert attention(wide, wide, wide, backend=backend).dtype == F64, "fp64 stays, as in torch"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_the_size_of_the_matrix_is_kept(backend: str) -> None:
    q, k, v = (torch.randn(1, 1, 64, 4).requires_grad_() for _ in range(3))
    kept: list[int] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention(q, k, v, causal=True, dropout_p=0.1, seed=1, backend=backend)
    assert kept and max(kept) <= 64 * 4


@pytest.mark.parametrize("wants", [False, True], ids=["no tensor", "no_grad"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_without_gradients(backend: str, wants: bool) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, 2, 9, 16).requires_grad_(wants) for _ in range(3))

    def stats(*x: Tensor) -> Any:
        return attention(*x, causal=True, return_stats=True, backend=backend)

    with torch.no_grad():
        assert same(torch.compile(stats, fullgraph=True, backend="aot_eager")(q, k, v), stats(q, k, v))


def test_retained_graphs_and_accumulated_gradients() -> None:
    inputs = make_inputs(CASES[0], F32)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, causal=True, return_lse=True)
    for _ in range(2):
        torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse), retain_graph=True)
    exact, eager = run(cast(inputs, F64), attend_reference), run(inputs, attend_reference)
    assert_accurate(leaves[0].grad, 2 * eager.dq, 2 * exact.dq, F32, "dq twice")


def test_a_tensor_left_over_from_a_transform_counts_as_what_it_held(backend: str, device: str) -> None:
    leaked: list[Tensor] = []

    def leaking(x: Tensor) -> Tensor:
        leaked.append(x)
        return x.sum()

    q, k, v = (torch.randn(1, 2, 5, 8, device=device) for _ in range(3))
    torch.func.grad(leaking)(q)
    k.requires_grad_()
    (got,) = torch.autograd.grad(attention(leaked[0], k, v, backend=backend).sum(), k)
    (wanted,) = torch.autograd.grad(attention(q, k, v, backend=backend).sum(), k)
    assert torch.equal(got, wanted)
