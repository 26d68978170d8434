"""Allocating and executing a plan, with kernels that only write down how they were started."""

import contextlib
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from andrea_triton import KVCache, attention, decode_attention, target, testing, varlen_attention
from andrea_triton.errors import CompileError
from andrea_triton.launch import compile as compiler
from andrea_triton.launch import run, start
from andrea_triton.launch.configs import SMALLEST, candidates
from andrea_triton.launch.plan import Launch, Saved, forward_plan
from andrea_triton.memory import Memory
from andrea_triton.problem import Problem, make_problem
from andrea_triton.spec import Mask, Score, make_spec
from andrea_triton.testing import functors

FP16 = torch.float16
STREAM = 4096


class Kernel:
    """A compiled kernel on a card with room for tiles of `room` elements."""

    function, packed_metadata, metadata = 7, (4, 1, 0), None

    def __init__(self, launch: Launch, room: int, started: list[tuple[Any, ...]]) -> None:
        self.config, self.room, self.started = launch.config, room, started
        self.told = compiler.describe(launch.args)

    def _init_handles(self) -> None:
        size = self.config.BLOCK_M * self.config.BLOCK_N
        if size > self.room:
            raise triton.runtime.errors.OutOfResources(size, self.room, "shared memory")

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *args: Any) -> Any:
        return grid, stream

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        assert (stream, function, packed) == (STREAM, self.function, self.packed_metadata)
        self.started.append((self.config, (x, y, z), rest[3:], rest[:3], self.told))


class Card:
    """Stands in for a GPU: what was planned, compiled, started."""

    def __init__(self, room: int, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[Any] = []
        self.started: list[tuple[Any, ...]] = []
        self.planned = 0

        def compiled(launch: Launch, where: Any) -> Kernel:
            assert where.arch == 80
            self.compiled.append(launch.config)
            return Kernel(launch, room, self.started)

        patch.setattr(start, "_kernels", {})
        patch.setattr(run, "_starts", Memory())
        patch.setattr(compiler, "compiled", compiled)
        patch.setattr(target, "gpu_target", lambda: SimpleNamespace(arch=80))
        patch.setattr(target, "target_of", lambda device: "sm_80")
        patch.setattr(target, "stream", lambda device: STREAM)
        patch.setattr(target, "current", lambda device: contextlib.nullcontext())
        for name in ("forward_plan", "backward_plan", "statistics_plan", "decode_plan"):
            patch.setattr(run, name, self.counted(getattr(run, name)))

    def counted(self, plan: Any) -> Any:
        def made(*args: Any) -> list[Launch]:
            self.planned += 1
            return list(plan(*args))

        return made


def call(M: int, D: int = 64) -> tuple[Problem, Tensor, Tensor]:
    q, k = torch.zeros(1, 2, M, D, dtype=torch.float16), torch.zeros(1, 2, M, D, dtype=torch.float16)
    return make_problem(q, k, k, make_spec(causal=True)), q, k


def attend(card: Card, M: int, D: int = 64) -> list[str]:
    """Warnings of one forward."""
    problem, q, k = call(M, D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.forward(q, k, k, problem, "triton")
    return [str(w.message) for w in caught]


def best(M: int, D: int = 64) -> Launch:
    problem, q, k = call(M, D)
    (launch,) = forward_plan(q, k, k, Saved(q, *(torch.zeros(1, 2, M) for _ in range(3))), problem, "sm_80", "ieee")
    return launch


def test_the_best_tiling_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    assert attend(card, 300) == []
    launch = best(300)
    ((config, grid, args, *_),) = card.started
    assert card.compiled == [config] == [launch.config] and grid == (*launch.grid, 1)
    assert len(args) == len(compiler.flatten(launch.args))
    assert {type(x) for x in args} == {int, float}, "what Triton's launcher reads fastest"


def test_out_of_resources_takes_the_next_smaller_tile_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card, tiles = Card(2048, monkeypatch), candidates("forward", "sm_80", 64, 2, 300, 300, "causal")
    fits = next(c for c in tiles if c.BLOCK_M * c.BLOCK_N <= 2048)
    (warning,) = attend(card, 300)
    assert "forward" in warning and str(tiles[0]) in warning and "shared memory" in warning
    assert card.compiled == list(tiles[: tiles.index(fits) + 1])
    assert attend(card, 300) == attend(card, 1000) == [], "found once, kept for every length"
    assert card.compiled == list(tiles[: tiles.index(fits) + 1])
    assert [started[:2] for started in card.started] == [(fits, (2, -(-M // fits.BLOCK_M), 1)) for M in (300, 300, 1000)]


def test_a_card_on_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(8, monkeypatch)
    with pytest.raises(CompileError, match=r"no tiling of forward fits 80 for head dims 64, 64.*backend='torch'"):
        attend(card, 300)
    assert card.compiled[-1] == SMALLEST and card.started == []


def test_what_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    for M in (1024, 33, 2, 4096):
        attend(card, M)
    assert len(card.compiled) == 1, "not a length"
    attend(card, 1024, D=128)
    assert len(card.compiled) == 2, "a head dim"


def test_nothing_is_started_for_an_empty_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    assert attend(card, 0) == [] and card.started == card.compiled == []


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


def test_a_forward_that_nothing_follows_keeps_no_pivots() -> None:
    x = torch.randn(1, 2, 45, 16)
    problem = make_problem(x, x, x, make_spec(causal=True))
    alone, followed = (run.forward(x, x, x, problem, "interpreter", learning) for learning in (False, True))
    assert alone.row_max is None and alone.row_sum is None and followed.row_max is not None
    assert torch.equal(alone.out, followed.out) and torch.equal(alone.lse, followed.lse)


Given = tuple[Tensor, Tensor, Tensor, Tensor]


def tensors(layout: str = "heads", M: int = 40, offset: int = 0, one: bool = False, dtype: torch.dtype = FP16) -> Given:
    """q, k, v, dout: (B, H, T, D) memory, (B, T, H, D) memory, rows with room after them, or one broadcast head."""
    made = []
    for _ in range(4):
        memory = torch.zeros(2 * 2 * M * 32 + offset, dtype=dtype)[offset:]
        if layout == "heads":
            made.append(memory.view(2, 2, 2 * M, 16)[:, :, ::2])
        elif layout == "rows":
            made.append(memory[: 2 * 2 * M * 16].view(2, M, 2, 16).transpose(1, 2))
        elif layout == "wide":
            made.append(memory.view(2, 2, M, 32)[..., :16])
        else:
            made.append(memory.view(8, 1, M, 16)[:2].expand(2, 2, M, 16))
    q, k, v, dout = made
    return (q, q, q, q) if one else (q, k, v, dout)


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, needs: tuple[bool, bool], **keywords: Any
) -> None:  # fmt: skip
    """A forward and a backward on the card."""
    extras = {name: keywords.pop(name) for name in ("sinks", "key_lengths", "seed", "bias", "mask", "score") if name in keywords}
    problem = make_problem(q, k, v, make_spec(**keywords), **extras)
    saved = run.forward(q, k, v, problem, "triton")
    run.backward(q, k, v, dout, dlse, saved, problem, "triton", needs, None, "sinks" in extras)


CALLS: dict[str, Any] = {
    "first": {},
    "other tensors": {},
    "rows": dict(layout="rows"),
    "wide": dict(layout="wide"),
    "one head": dict(layout="broadcast"),
    "off the grid": dict(offset=1),
    "off by 16 bytes": dict(offset=8),
    "all one": dict(one=True),
    "all one, rows": dict(layout="rows", one=True),
    "rows again": dict(layout="rows"),
    "longer": dict(M=41),
    "fp32": dict(dtype=torch.float32),
    "full": dict(causal=False),
    "q_start": dict(q_start=3),
    "scale": dict(scale=0.25),
    "negative scale": dict(scale=-0.25),
    "window": dict(window=7),
    "other window": dict(window=(9, 2), causal=False),
    "softcap": dict(softcap=3.0),
    "precise": dict(precise=True),
    "no dq": dict(needs=(False, True)),
    "no dk, dv": dict(needs=(True, False)),
    "dlse": dict(dlse=torch.zeros(2, 2, 40)),
    "sinks": dict(sinks=torch.zeros(2)),
    "other sinks": dict(sinks=torch.zeros(8)[2:4]),
    "wide sinks": dict(sinks=torch.zeros(2, dtype=torch.float64)),
    "sinks off the grid": dict(sinks=torch.zeros(3)[1:]),
    "key lengths": dict(key_lengths=torch.tensor([3, 4], dtype=torch.int32)),
    "dropout": dict(dropout_p=0.5, seed=1),
    "other seed": dict(dropout_p=0.5, seed=2),
    "seed in memory": dict(dropout_p=0.5, seed=torch.zeros(1, dtype=torch.int64)),
    "mask": dict(mask=torch.ones(40, 40, dtype=torch.bool)),
    "bias": dict(bias=torch.zeros(1, 1, 40, 40)),
    "full bias": dict(bias=torch.zeros(2, 2, 40, 40)),
}


def settings(name: str) -> dict[str, Any]:
    """The arguments of both_ways."""
    chosen = {"needs": (True, True), "dlse": None, "causal": True, **CALLS[name]}
    form = {x: chosen.pop(x) for x in ("layout", "M", "offset", "one", "dtype") if x in chosen}
    return dict(zip(("q", "k", "v", "dout"), tensors(**form), strict=True)) | chosen


def test_started_again_is_started_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a list, twice in a row and twice over, gets what a plan of its own would give it."""
    card, memory = Card(2**30, monkeypatch), []
    allocate = run.allocate
    monkeypatch.setattr(run, "allocate", lambda *args: memory.append(allocate(*args)) or memory[-1])

    def started(arguments: dict[str, Any]) -> list[Any]:
        """What was started, with addresses as places in the call's tensors, these numbered as they come."""
        memory.clear()
        card.started.clear()
        both_ways(**arguments)
        own = [t for t in arguments.values() if isinstance(t, Tensor)] + memory
        spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in own]

        seen: dict[int, int] = {}

        def place(x: Any) -> Any:
            x = x.data_ptr() if isinstance(x, Tensor) else x
            return next(((seen.setdefault(i, len(seen)), x - at) for i, (at, size) in enumerate(spans) if at <= x < at + size), x)

        return [(config, grid, [place(x) for x in args], told) for config, grid, args, _, told in card.started]

    for _ in range(2):
        for name in CALLS:
            first = started(settings(name))
            again = started(settings(name))
            run._starts.clear()
            assert first == again == started(settings(name)), name


def test_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    for name in CALLS:
        before = card.planned
        both_ways(**settings(name))
        both_ways(**settings(name))
        assert card.planned - before <= 2, name
    before = card.planned
    for name in CALLS:
        both_ways(**settings(name))
    assert card.planned == before


@pytest.mark.parametrize("case", testing.CASES, ids=lambda case: case.name)
def test_nothing_is_planned_at_the_second_call_of_any_feature(case: testing.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public functions, with other tensors, and another seed of the dropout."""
    card = Card(2**30, monkeypatch)
    monkeypatch.setattr(target, "check_backend", lambda name, device: None)
    planned = []
    for seed in range(3):
        inputs = testing.make_inputs(case, FP16)
        extras = inputs.extras | ({"seed": seed} if case.dropout_p else {})
        more = {**inputs.settings, **extras, "backend": "triton", "return_stats": True, "return_lse": True}
        function: Any = varlen_attention if "max_q" in more else attention
        learned = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out, lse, *_ = function(*learned, **more)
        torch.autograd.grad((out, lse), learned, (inputs.dout, inputs.dlse))
        with torch.no_grad():
            function(*learned, **more)
        planned.append(card.planned)
    assert planned[0] == 4 and planned[1:] == planned[:1] * 2, "forward, statistics, backward, and a forward without gradients"


def test_nothing_is_planned_at_the_second_call_over_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its lengths have become."""
    card = Card(2**30, monkeypatch)
    monkeypatch.setattr(target, "check_backend", lambda name, device: None)
    cache, k = KVCache(2, 2, 37, 16, dtype=FP16), torch.zeros(2, 2, 3, 16, dtype=FP16)
    for _ in range(3):
        cache.append(k, k)
        decode_attention(torch.zeros(2, 4, 1, 16, dtype=FP16), cache, alibi=torch.rand(4), backend="triton")
    assert card.planned == 1


def test_own_functions_are_planned_for_every_kind_of_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 1.0 and True are one key of a dictionary and three kinds of number; -0.0 is another number than 0.0."""
    card, numbers = Card(2**30, monkeypatch), (1, 1.0, True, 0.0, -0.0)
    for number in numbers * 2:
        card.started.clear()
        score = Score(functors.distance_penalty, functors.distance_penalty_grad, args=(number,))
        both_ways(**settings("first"), score=score)
        _, _, args, *_ = card.started[0]
        signs = [math.copysign(1, x) for x in args if x == 0 and type(x) is float]
        assert number != 0 or signs == [math.copysign(1, number)]
    assert card.planned == 2 * len(numbers)
    assert len(card.compiled) == 8, "for an int and for a float"


def test_tensors_of_own_functions_arrive_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    card, tables = Card(2**30, monkeypatch), [torch.zeros(40, dtype=torch.int32) for _ in range(3)]
    for table in tables:
        card.started.clear()
        both_ways(**settings("first"), mask=Mask(functors.same_document, args=(table,)))
        assert all(table.data_ptr() in args for _, _, args, *_ in card.started if len(args) > 20)
    assert card.planned == 2


def test_what_nothing_is_known_of_is_planned_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    for _ in range(3):
        score = Score(functors.distance_penalty, functors.distance_penalty_grad, args=(np.float64(1),))
        both_ways(**settings("first"), score=score)
    assert card.planned == 2, "a numpy number that is a float"
    for _ in range(3):
        both_ways(
            **settings("first"), score=Score(functors.distance_penalty, functors.distance_penalty_grad, args=(np.int64(1),))
        )
    assert card.planned == 2 + 6 and len(run._starts) == 2


def test_precision_of_fp32_is_asked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(2**30, monkeypatch)
    for precision in ("ieee", "tf32", "ieee", "tf32"):
        monkeypatch.setattr(target, "float32_precision", lambda precision=precision: precision)
        both_ways(**settings("fp32"))
    assert card.planned == 4 and len(card.compiled) == 8


def test_hooks_of_triton_are_called_around_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    card, hook = Card(2**30, monkeypatch), print
    attend(card, 40)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    attend(card, 40)
    grid = card.started[1][1]
    assert [rest for *_, rest, _ in card.started] == [(None, None, None), ((grid, STREAM), hook, None)]


def test_threads_share_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start gets the addresses of its own thread's tensors."""
    card = Card(2**30, monkeypatch)
    kept = [settings("first") for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: both_ways(**kept[i % 8]), range(64)))
    firsts = [args[0] for _, _, args, *_ in card.started if args[0] in {x["q"].data_ptr() for x in kept}]
    assert len(card.started) == 64 * 4 and sorted(firsts) == sorted(8 * 3 * [x["q"].data_ptr() for x in kept])
