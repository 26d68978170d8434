"""Allocating and executing a plan, with kernels that only write down how they were started."""

import contextlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from andrea_triton import target
from andrea_triton.errors import CompileError
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import run
from andrea_triton.launch.configs import SMALLEST, candidates
from andrea_triton.launch.plan import Launch, Saved, forward_plan
from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import make_spec

CPU = torch.device("cpu")


class Kernel:
    """A compiled kernel on a card with room for tiles of `room` elements."""

    def __init__(self, launch: Launch, room: int, started: list[tuple[Any, ...]]) -> None:
        self.config, self.room, self.started = launch.config, room, started

    def _init_handles(self) -> None:
        size = self.config.BLOCK_M * self.config.BLOCK_N
        if size > self.room:
            raise triton.runtime.errors.OutOfResources(size, self.room, "shared memory")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.started.append((self.config, grid, args))


class Card:
    """Stands in for a GPU: what was compiled, what was started."""

    def __init__(self, room: int, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[Any] = []
        self.started: list[tuple[Any, ...]] = []

        def compiled(launch: Launch, where: Any) -> Kernel:
            assert where.arch == 80
            self.compiled.append(launch.config)
            return Kernel(launch, room, self.started)

        patch.setattr(run, "_kernels", {})
        patch.setattr(compiler, "compiled", compiled)
        patch.setattr(target, "gpu_target", lambda: SimpleNamespace(arch=80))
        patch.setattr(target, "current", lambda device: contextlib.nullcontext())


def plan(M: int, D: int = 64, N: int | None = None) -> tuple[list[Launch], Problem]:
    q, k = torch.zeros(1, 2, M, D, dtype=torch.float16), torch.zeros(1, 2, M if N is None else N, D, dtype=torch.float16)
    problem = make_problem(q, k, k, make_spec(causal=True))
    saved = Saved(q, *(torch.zeros(1, 2, M) for _ in range(3)))
    return forward_plan(q, k, k, saved, problem, "sm_80", "ieee"), problem


def start(card: Card, M: int, D: int = 64) -> list[str]:
    """Warnings of one start."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.execute(*plan(M, D), "triton")
    return [str(w.message) for w in caught]


def test_the_best_tiling_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    assert start(card, 300) == []
    (launch,), _ = plan(300)
    ((config, grid, args),) = card.started
    assert card.compiled == [config] == [launch.config] and grid == (*launch.grid, 1)
    assert len(args) == len(launch.kernel.arg_names)
    assert args[-2:] == (config.BLOCK_M, config.BLOCK_N)


def test_out_of_resources_takes_the_next_smaller_tile_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card, best = Card(2048, monkeypatch), candidates("forward", "sm_80", 64, 2, 300, 300)
    fits = next(c for c in best if c.BLOCK_M * c.BLOCK_N <= 2048)
    (warning,) = start(card, 300)
    assert "forward" in warning and str(best[0]) in warning and "shared memory" in warning
    assert card.compiled == list(best[: best.index(fits) + 1])
    assert start(card, 300) == start(card, 1000) == [], "found once, kept for every length"
    assert card.compiled == list(best[: best.index(fits) + 1])
    assert [(config, grid) for config, grid, _ in card.started] == [
        (fits, (2, -(-M // fits.BLOCK_M), 1)) for M in (300, 300, 1000)
    ]


def test_a_card_on_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(8, monkeypatch)
    with pytest.raises(CompileError, match=r"no tiling of forward fits 80 for head dims 64, 64.*backend='torch'"):
        start(card, 300)
    assert card.compiled[-1] == SMALLEST and card.started == []


def test_what_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    for M in (1024, 33, 2, 4096):
        start(card, M)
    assert len(card.compiled) == 1, "not a length"
    start(card, 1024, D=128)
    assert len(card.compiled) == 2, "a head dim"


def test_nothing_is_started_for_an_empty_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    assert start(card, 0) == [] and card.started == card.compiled == []


def like(t: Tensor, features: int, packed: bool = False) -> Tensor:
    return run.allocate_like(t, features, packed)


def test_outputs_lie_in_memory_as_their_tensors() -> None:
    heads, rows = torch.zeros(2, 3, 5, 8), torch.zeros(2, 5, 3, 8).transpose(1, 2)
    assert like(heads, 16).shape == like(rows, 16).shape == (2, 3, 5, 16)
    assert like(heads, 16).is_contiguous() and like(rows, 16).transpose(1, 2).is_contiguous()
    assert like(heads.half(), 16).dtype == torch.float16
    assert like(heads[:1, :1].expand(2, 3, 5, 8), 16).untyped_storage().nbytes() == 2 * 3 * 5 * 16 * 4


def test_packed_outputs_start_as_zero() -> None:
    """No kernel visits the rows after the last sequence."""
    assert torch.equal(like(torch.zeros(7, 3, 8), 16, packed=True), torch.zeros(7, 3, 16))


def test_arguments_of_a_kernel_in_its_own_order() -> None:
    (launch,), _ = plan(64)
    by_name = dict(zip(launch.kernel.arg_names, run.arguments(launch), strict=True))
    assert by_name["BLOCK_M"] == launch.config.BLOCK_M and by_name["BLOCK_N"] == launch.config.BLOCK_N
    assert [by_name[name] for name in launch.kernel.arg_names if name not in launch.constexprs] == list(launch.args)


def test_copies_are_made_only_of_what_has_no_unit_stride() -> None:
    x = torch.randn(1, 2, 5, 16)
    made: list[Any] = []
    for t in (x, x.transpose(1, 2), x[..., ::2], x.expand(3, 2, 5, 16), x[..., :1].expand(1, 2, 5, 4)):
        problem = make_problem(t, t, t, make_spec())
        saved = run.forward(t, t, t, problem, "interpreter")
        made.append(saved.out)
        compact = t.contiguous()
        assert torch.equal(saved.out, run.forward(compact, compact, compact, problem, "interpreter").out)
    assert all(out.isfinite().all() for out in made)
