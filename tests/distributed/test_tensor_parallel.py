"""The library's modules under torch's parallelize_module, on two ranks: outputs and every gradient are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from andrea_triton.cache import KVCache
from andrea_triton.distributed import tensor_parallel_plan
from andrea_triton.errors import UnsupportedError
from andrea_triton.nn import Andrea, AndreaConfig, CausalSelfAttention, CrossAttention, SelfAttention, generate
from andrea_triton.spec import Mask
from tests.distributed.ranks import Failed, Ranks

RESOLUTION = torch.finfo(torch.float32).eps  # everything runs in fp64 and agrees beyond what fp32 can tell
MODULES: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: SelfAttention(16, 4, bias=True),
    "causal, grouped, window, sinks, rotary": lambda: CausalSelfAttention(16, 4, 2, window=3, sinks=True, rotary=True),
    "cross, grouped, sinks": lambda: CrossAttention(16, 4, 2, d_context=12, sinks=True),
    "Andrea": lambda: Andrea(AndreaConfig(vocab_size=13, d_model=16, n_head=4, n_layer=2, context=9, n_kv_head=2)),
    "Andrea, rotary": lambda: Andrea(AndreaConfig(vocab_size=13, d_model=16, n_head=4, n_layer=1, context=9, positions="rotary")),
}
MODES = ("local", "DTensor", "sequence")


def made(name: str) -> nn.Module:
    """A module with weights that are the same wherever it is made; its sinks are not zero."""
    torch.manual_seed(3)
    module = MODULES[name]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(module: nn.Module) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a call: with lengths, and masks of one head and of each."""
    if isinstance(module, Andrea):
        return (torch.randint(13, (2, 8)),), {}
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([8, 5])
    if isinstance(module, CrossAttention):
        return (x, torch.randn(2, 8, 12, dtype=torch.float64, requires_grad=True)), {"context_lengths": lengths}
    mask = torch.rand(2, 1 if module.causal else 4, 8, 8) < 0.7
    return (x,), {"key_lengths": lengths, "mask": mask}


def split(module: nn.Module, mesh: DeviceMesh, mode: str) -> nn.Module:
    """The module over the ranks: projections to plain tensors, to DTensors, or of inputs that are split along the sequence."""
    plan: dict[str, ParallelStyle] = tensor_parallel_plan(module)
    for name in ("W_Q", "W_K", "W_V") if mode != "local" else ():
        for whole in [n for n in plan if n.endswith(name)]:
            plan[whole] = ColwiseParallel(
                input_layouts=Shard(1) if mode == "sequence" else None, use_local_output=mode != "DTensor"
            )
    return parallelize_module(module, mesh, plan)


def whole(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.full_tensor() if isinstance(t, DTensor) else t


def results(module: nn.Module, args: tuple[Tensor, ...], settings: dict[str, Any]) -> dict[str, Tensor]:
    """The output and the gradients of inputs and parameters."""
    out = module(*args, **settings)
    (out.sin() * torch.linspace(-1, 1, out.shape[-1], dtype=torch.float64)).sum().backward()
    found = {"out": out.detach(), **{f"input {i}": whole(t.grad) for i, t in enumerate(args) if t.requires_grad}}
    return found | {name: whole(parameter.grad) for name, parameter in module.named_parameters()}


def differences(group: Any, name: str, mode: str) -> dict[str, float]:
    """How far output and gradients of a split module are from one process."""
    mesh = DeviceMesh.from_group(group, "cpu")
    module, alone = split(made(name), mesh, mode), made(name)
    args, settings = inputs(alone)
    wanted = results(alone, args, settings)
    own = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in args)
    if mode != "sequence":
        got = results(module, own, settings)
    else:
        parts = tuple(t.chunk(2, 1)[mesh.get_local_rank()].detach().requires_grad_() for t in own)
        got = results(module, parts, settings)
        for i, part in enumerate(parts):
            assert part.grad is not None
            got[f"input {i}"] = whole(DTensor.from_local(part.grad, mesh, [Shard(1)]))
    assert got.keys() == wanted.keys()
    return {key: float((got[key] - wanted[key]).abs().max()) for key in wanted}


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in MODULES for mode in MODES if "Andrea" not in name or mode != "sequence"]
)
def test_equals_one_process(ranks: Ranks, name: str, mode: str) -> None:
    for errors in ranks.run(differences, 2, name, mode):
        assert all(error < RESOLUTION for error in errors.values()), errors


def decoded(group: Any, mode: str) -> float:
    """How far tokens through a cache, in pieces, are from one pass in one process."""
    mesh = DeviceMesh.from_group(group, "cpu")
    name = "causal, grouped, window, sinks, rotary"
    module, alone, cache = split(made(name), mesh, mode), made(name), KVCache(2, 1, 8, 4, dtype=torch.float64)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    with torch.no_grad():
        out = torch.cat([module(piece, cache=cache) for piece in (x[:, :4], x[:, 4:5], x[:, 5:])], 1)
        return float((out - alone(x)).abs().max())


@pytest.mark.parametrize("mode", ["local", "DTensor"])
def test_a_cache_holds_the_heads_of_its_rank(ranks: Ranks, mode: str) -> None:
    assert all(error < RESOLUTION for error in ranks.run(decoded, 2, mode))


def written(group: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What a split model and one process write."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = split(made("Andrea"), mesh, "local")
    assert isinstance(model, Andrea)
    assert model.new_caches(1)[0].kv_heads == 1
    alone = made("Andrea")
    assert isinstance(alone, Andrea)
    return tuple(generate(m, [1, 2], 6, temperature=1.0, seed=0).new for m in (model, alone))  # type: ignore[return-value]


@pytest.mark.slow
def test_generation_writes_the_same(ranks: Ranks) -> None:
    for ours, alone in ranks.run(written, 2):
        assert ours == alone


def saved(group: Any, path: str) -> None:
    """Save a split model, by all ranks."""
    model = split(made("Andrea"), DeviceMesh.from_group(group, "cpu"), "local")
    assert isinstance(model, Andrea)
    model.save(path)


def test_a_split_model_is_saved_whole(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ranks.run(saved, 2, str(tmp_path / "model.safetensors"))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    pairs = zip(Andrea.load(tmp_path / "model.safetensors").parameters(), made("Andrea").parameters(), strict=True)
    assert all(torch.equal(read, written) for read, written in pairs)


def dropped(group: Any) -> list[tuple[bool, bool, Tensor]]:
    """Of plain tensors and DTensors: whether the generator's state repeats a call and, run on, another comes; and the output."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), []
    for mode in ("local", "DTensor"):
        torch.manual_seed(0)
        module = split(CausalSelfAttention(16, 2, dropout=0.5), mesh, mode)
        x = torch.ones(1, 8, 16)
        outs = []
        for seed in (5, None, 5):
            torch.manual_seed(seed) if seed is not None else None
            outs.append(module(x).detach())
        found.append((torch.equal(outs[0], outs[2]), not torch.equal(outs[0], outs[1]), outs[0]))
    return found


def test_dropout_is_drawn_for_each_rank(ranks: Ranks) -> None:
    first, second = ranks.run(dropped, 2)
    for (again, other, out), (_, _, there) in zip(first, second, strict=True):
        assert again and other and torch.equal(out, there)


def masks_of_heads(group: Any) -> Tensor:
    """Which weights are kept by each of four heads, two on a rank: (4, 16, 16)."""
    from andrea_triton.nn import attention

    seen: list[Tensor] = []
    real, attention.attend = (
        attention.attend,
        lambda q, k, v, *rest: (  # type: ignore[assignment]
            seen.append(real(q, k, torch.eye(16).expand(1, 2, 16, 16), *rest) != 0),
            real(q, k, v, *rest),
        )[1],
    )
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(0)
        split(SelfAttention(64, 4, dropout=0.5), mesh, "local")(torch.zeros(1, 16, 64))
    finally:
        attention.attend = real
    return DTensor.from_local(seen[0][0], mesh, [Shard(0)]).full_tensor()


def test_no_two_heads_drop_alike(ranks: Ranks) -> None:
    heads = ranks.run(masks_of_heads, 2)[0]
    assert len({head.numpy().tobytes() for head in heads}) == 4


def refused(group: Any, kind: str) -> None:
    """A call that must fail, on every rank."""
    mesh = DeviceMesh.from_group(group, "cpu")
    backend = "naive" if kind == "a dense backend" else None
    module: nn.Module = CausalSelfAttention(16, 4, 1 if kind == "one key head" else None, backend=backend)
    if kind == "queries alone":
        module = parallelize_module(module, mesh, {"W_Q": ColwiseParallel(), "W_O": RowwiseParallel()})
    else:
        module = split(module, mesh, "DTensor" if backend else "local")
    mask = Mask(None, torch_fn=lambda b, h, i, j: i == j) if kind == "a function" else None
    module(torch.randn(1, 3, 16), mask=mask)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one key head", "ShapeError: n_kv_head is 1, which 2 ranks do not divide; wanted whole key heads on every rank"),
        ("queries alone", "ShapeError: W_Q gives 2 of 4 heads and W_K 4 of 4; wanted the same share"),
        ("a dense backend", "UnsupportedError: backend='naive' is not supported by projections that return DTensors"),
        ("a function", "UnsupportedError: mask=Mask.* is not supported by heads split over ranks"),
    ],
)
def test_what_cannot_be_right_is_refused(ranks: Ranks, kind: str, message: str) -> None:
    with pytest.raises(Failed, match=message):
        ranks.run(refused, 2, kind)


def test_plan_names_what_it_splits() -> None:
    model = nn.Sequential(nn.Linear(16, 16), MODULES["Andrea, rotary"]())
    names = {"1.tokens", "1.head", "1.blocks.0.widen", "1.blocks.0.narrow", *(f"1.blocks.0.attention.W_{c}" for c in "QKVO")}
    assert tensor_parallel_plan(model).keys() == names
    with pytest.raises(UnsupportedError, match="a Linear is not supported by tensor_parallel_plan"):
        tensor_parallel_plan(nn.Linear(2, 2))
