"""Models that know only torch: their attention made by this library within a `with`, and as one of torch's flash kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import bias as torch_bias
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint

from andrea_triton.errors import DTypeError, UnsupportedError
from andrea_triton.integrations import sdpa
from andrea_triton.integrations.sdpa import NAME, register_flash, replace_sdpa

# torch.compile itself makes an instance of what it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Block(nn.Module):
    """Attention as anyone writes it, under a name of its own for the function."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each attention that the library makes."""
    made: list[int] = []
    ours = sdpa.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(1)
        return ours(*args, **kwargs)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    yield made


def gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(block(x).square().sum(), list(block.parameters())))


def test_model_is_routed_and_reverts(calls: list[int]) -> None:
    block, x = Block(), torch.randn(2, 7, 32)
    wanted = gradients(block, x)
    with replace_sdpa():
        got = gradients(block, x)
        assert len(calls) == 1
        torch.nn.functional.scaled_dot_product_attention(*[x[:, None]] * 3)
        assert len(calls) == 2
    torch.testing.assert_close(got, wanted)
    block(x)
    with pytest.raises(ZeroDivisionError), replace_sdpa():
        raise ZeroDivisionError
    block(x)
    assert len(calls) == 2


@pytest.mark.parametrize("mask", [torch.ones(7, 7).tril().bool(), torch.randn(7, 7)], ids=["bool", "float"])
def test_masks_keep_their_meaning(mask: Tensor, calls: list[int]) -> None:
    block, x = Block(), torch.randn(2, 7, 32)
    wanted = block(x, mask)
    with replace_sdpa():
        torch.testing.assert_close(block(x, mask), wanted)
    assert len(calls) == 1


def test_causal_bias_reaches_the_library(calls: list[int]) -> None:
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 10, 8)
    lower = torch_bias.causal_lower_right(6, 10)
    wanted = scaled_dot_product_attention(q, k, k, lower)
    with replace_sdpa():
        torch.testing.assert_close(scaled_dot_product_attention(q, k, k, lower), wanted)
    assert len(calls) == 1


def test_other_threads_are_left_alone(calls: list[int]) -> None:
    block, x = Block(), torch.randn(1, 3, 32)
    with replace_sdpa():
        thread = threading.Thread(target=block, args=(x,))
        thread.start()
        thread.join()
    assert calls == []


def test_what_cannot_be_done_raises() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)], layout=torch.jagged)
    with replace_sdpa(), pytest.raises(DTypeError, match=r"query is a nested tensor .* use varlen_attention"):
        scaled_dot_product_attention(nested, nested, nested)
    with replace_sdpa(), pytest.raises(ValueError, match="broadcast"):
        scaled_dot_product_attention(torch.randn(2, 1, 2, 8), torch.randn(3, 1, 2, 8), torch.randn(3, 1, 2, 8))


@pytest.mark.parametrize("inside", [False, True], ids=["with around compiled", "with inside compiled"])
def test_compiled_model_is_routed(inside: bool) -> None:
    block, x, graphs = Block(), torch.randn(2, 7, 32), []
    names = ("scaled_dot_product_attention", "andrea_triton")

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append("".join(part.code for part in graph.modules() if isinstance(part, torch.fx.GraphModule)))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def routed(x: Tensor) -> Tensor:
        with replace_sdpa():
            return block(x)

    torch._dynamo.reset()
    compiled = torch.compile(routed if inside else block, fullgraph=True, backend=backend)
    wanted = gradients(block, x)
    with replace_sdpa():
        got = list(torch.autograd.grad(compiled(x).square().sum(), list(block.parameters())))
        with torch.no_grad():
            compiled(x)
    torch.testing.assert_close(got, wanted)
    assert [[name in graph for name in names] for graph in graphs] == [[False, True]] * 2
    if not inside:
        compiled(x)
        assert len(graphs) == 3 and names[0] in graphs[2] and names[1] not in graphs[2]


def test_checkpointed_model_is_routed_both_times(calls: list[int]) -> None:
    block, x = Block(), torch.randn(2, 7, 32)
    wanted = gradients(block, x)
    out = checkpoint(block, x, use_reentrant=False, context_fn=lambda: (replace_sdpa(), replace_sdpa()))
    got = list(torch.autograd.grad(out.square().sum(), list(block.parameters())))
    torch.testing.assert_close(got, wanted)
    assert len(calls) == 2


@pytest.mark.slow
def test_checkpoints_inside_a_compiled_function() -> None:
    """Dynamo sees the layer once, in the graph of both passes: nothing needs to be told."""
    block, x = Block(), torch.randn(2, 7, 32)

    def twice(x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    wanted = torch.autograd.grad(twice(x).square().sum(), list(block.parameters()))
    torch._dynamo.reset()
    with replace_sdpa():
        out = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(block.parameters())), wanted)


def test_checkpoint_that_was_not_told_is_noticed() -> None:
    with replace_sdpa():
        out = checkpoint(Block(), torch.randn(2, 7, 32), use_reentrant=False)
        with pytest.raises(CheckpointError):
            out.sum().backward()


@pytest.mark.parametrize("training", [False, True])
def test_torch_modules_that_hide_their_attention_are_left_alone(training: bool, calls: list[int]) -> None:
    alone = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 7, 32)
    with torch.set_grad_enabled(training):
        wanted = alone(x, x, x, need_weights=False)[0], layer(x)
        with replace_sdpa():
            got = alone(x, x, x, need_weights=False)[0], layer(x)
    torch.testing.assert_close(got, wanted)
    assert calls == []


@pytest.fixture
def flash() -> Iterator[None]:
    """torch's flash operators, which have no kernel on a CPU, made by the library there."""
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this torch has no hook for flash implementations")
    register_flash("CPU")
    torch.nn.attention.activate_flash_attention_impl(NAME)
    assert torch.nn.attention.current_flash_attention_impl() == NAME
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_flash_operator_is_attention(settings: dict[str, Any], flash: None) -> None:
    inputs = [torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, **settings)
    wanted = scaled_dot_product_attention(*inputs, **settings)
    torch.testing.assert_close(out, wanted)
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    flowing = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, flowing), torch.autograd.grad(wanted, inputs, flowing))


def test_flash_operator_drops_the_same_weights_in_its_backward(flash: None) -> None:
    q, k = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True)
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.4)[0]
    # The output is linear in v, so that this holds for one mask of dropout and not for two.
    torch.testing.assert_close((torch.autograd.grad(out.sum(), v)[0] * v).sum(), out.sum())
    other = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.4)[0]
    assert not torch.equal(out, other)


def test_flash_operator_results_are_as_torch_describes_them(flash: None) -> None:
    x = torch.randn(2, 9, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    got = torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    with torch.device("meta"):
        wanted = torch.ops.aten._scaled_dot_product_flash_attention(*[x.to("meta")] * 3)
    for mine, theirs in zip(got, wanted, strict=True):
        if isinstance(theirs, Tensor):
            assert (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        else:
            assert mine == theirs
    with pytest.raises(UnsupportedError, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x, return_debug_mask=True)


def test_flash_operator_is_given_back(flash: None) -> None:
    x = torch.randn(1, 1, 2, 8)
    torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None
    with pytest.raises(NotImplementedError):
        torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)


def test_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(UnsupportedError, match="register_flash"):
        register_flash()
