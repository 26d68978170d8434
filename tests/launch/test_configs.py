"""The table of tilings: every entry fits its card's shared memory, and smaller ones follow it."""

import itertools

import pytest
import torch

from andrea_triton.counting.calls import machine_code
from andrea_triton.counting.cards import CARDS, Card
from andrea_triton.counting.launches import compile_launch
from andrea_triton.counting.report import count
from andrea_triton.launch.compile import compiled, gpu_target
from andrea_triton.launch.configs import (
    DELTA,
    FAMILIES,
    HALF,
    KINDS,
    SMALLEST,
    SPECIAL,
    Config,
    candidates,
    family,
    three_products,
)
from andrea_triton.launch.plan import Grads, Launch, Saved, backward_plan, forward_plan
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec

KERNELS = ("forward", "dkdv", "dq", "dbias", "statistics")
HEAD_DIMS = (32, 64, 128, 256)
BARRIERS = 1024  # beside the tiles, which lie at multiples of this


def shared_memory(kernel: str, card: Card, config: Config, D: int, itemsize: int, kind: str = "") -> int:
    """Bytes that a kernel takes at most.

    The rows that a program keeps lie in shared memory once; of the rows that stream by, NVIDIA's hold as many copies as there are
    stages, or one more transposed. AMD's prefetch into registers; what lies in shared memory changes its layout there."""
    m, n, _, stages, *_ = config
    kept, streamed = (n, m) if kernel == "dkdv" else (m, n)
    kept *= 2 if kind == "tf32x3" else 1  # both parts of each number
    width = D if kernel == "forward" else 2 * D
    if card.target.startswith("gfx"):
        return itemsize * (kept * width + m * n)
    barriers = BARRIERS if int(card.target[3:]) >= 90 else 0
    if kernel == "forward":
        return itemsize * (kept * D + streamed * D * max(2 * stages, 3)) + barriers
    return itemsize * (kept + max(stages, 2) * streamed) * width + barriers


ENTRIES = [
    pytest.param(card, kernel, D, id=f"{card.target} {kernel} D={D}")
    for card, kernel, D in itertools.product(CARDS.values(), ("forward", "dkdv", "dq"), HEAD_DIMS)
]


@pytest.mark.parametrize(("card", "kernel", "D"), ENTRIES)
def test_every_entry_fits_its_card(card: Card, kernel: str, D: int) -> None:
    first = candidates(kernel, card.target, D, 2, 4096, 4096)[0]
    assert first == HALF[kernel, family(card.target)][D]
    assert shared_memory(kernel, card, first, D, 2) <= card.shared_per_cta
    assert first.num_warps * card.warp_size <= 1024


def launches(target: str, D: int, dtype: torch.dtype = torch.float16, precision: str = "ieee") -> dict[str, Launch]:
    x, rows = torch.zeros(1, 1, 256, D, dtype=dtype), torch.zeros(3, 1, 256)
    problem, saved = make_problem(x, x, x, make_spec(causal=True)), Saved(x, *rows.unsqueeze(1))
    plan = forward_plan(x, x, x, saved, problem, target, precision)
    plan += backward_plan(x, x, x, x, None, saved, rows, Grads(x, x, x), problem, target, precision)
    return {launch.name: launch for launch in plan}


@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        *(("sm_90", "forward"), ("sm_86", "dkdv")),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("sm_80", "forward"), ("sm_90", "dq"), ("gfx942", "dq"))),
    ],
)
def test_the_formula_bounds_what_the_compiler_takes(target: str, kernel: str) -> None:
    launch = launches(target, 64)[kernel]
    taken = compiled(launch, gpu_target(target)).metadata.shared
    assert 0 < taken <= shared_memory(kernel, CARDS[target], launch.config, 64, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "kernel", "D"),
    [(card, kernel, D) for card in ("sm_80", "sm_90") for kernel in ("forward", "dkdv", "dq") for D in (32, 64) if
     three_products(card, D)],
)  # fmt: skip
def test_three_products_spill_nothing_and_fit(target: str, kernel: str, D: int) -> None:
    """Where they are the default: the stack of a kernel is what its registers cannot hold."""
    launch = launches(target, D, torch.float32, "tf32x3")[kernel]
    found = compile_launch(launch, make_problem(*[torch.zeros(1, 1, 256, D)] * 3, make_spec(causal=True)), target, {})
    assert machine_code(found, target).spill_stores == 0
    assert 0 < found.kernel.metadata.shared <= shared_memory(kernel, CARDS[target], launch.config, D, 4, "tf32x3")


STATED = [
    pytest.param(kernel, D, variant, id=f"{kernel} D={D} {variant}", marks=[pytest.mark.slow] * ((D, variant) != (64, "causal")))
    for (kernel, D), variant in itertools.product(
        itertools.product(("forward", "dkdv", "dq"), (32, 64, 128)), ("causal", "window", "gqa", "sinks")
    )
]


@pytest.mark.parametrize(("kernel", "D", "variant"), STATED)
def test_as_many_programs_fit_hopper_as_an_entry_states_and_none_spills(kernel: str, D: int, variant: str) -> None:
    row = next(x for x in count("sm_90", D, "bf16", variant, 1024) if x.kernel == kernel)
    assert row.config is not None and row.code is not None
    assert row.code.ctas_per_sm >= row.config.programs > 0
    at_most = 4 if (kernel, D) == ("dkdv", 32) else 0  # a register or two, which cost less than a fourth program less
    assert row.code.spills_in_loops <= at_most


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("target", [*FAMILIES, "sm_70", "gfx1100", "xpu"])
def test_smaller_tilings_follow_to_the_smallest(target: str, itemsize: int) -> None:
    for kernel, D in itertools.product(KERNELS, (1, 64, 128, 256)):
        found = candidates(kernel, target, D, itemsize, 1000, 1000)
        assert found[-1] == SMALLEST and len(set(found)) == len(found)
        sizes = [(c.BLOCK_M * c.BLOCK_N * c.num_stages, c.num_stages) for c in found]
        assert sizes == sorted(sizes, reverse=True)
        for c in found:
            assert all(side >= 16 and side & (side - 1) == 0 for side in c[:2])
            assert c.num_warps in (1, 2, 4, 8) and c.num_stages >= 1


@pytest.mark.parametrize("target", [*FAMILIES, "generic"])
def test_wider_elements_start_with_smaller_tiles(target: str) -> None:
    for kernel, D in itertools.product(KERNELS, HEAD_DIMS):
        half, single, double = (candidates(kernel, target, D, itemsize, 1000, 1000) for itemsize in (2, 4, 8))
        bare = [config._replace(HELD=False, ONE_LOOP=False, programs=0, LEAN=False) for config in half]
        assert bare.index(single[0]) == min(1, len(half) - 1) and bare.index(double[0]) == min(2, len(half) - 1)


def test_head_dims_are_rounded_up() -> None:
    for D, row in ((1, 32), (32, 32), (33, 64), (40, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256)):
        for kernel in ("forward", "dkdv", "dq"):
            assert candidates(kernel, "sm_80", D, 2, 64, 64)[0] == HALF[kernel, "ampere"][row]


def test_families() -> None:
    assert {kernel for kernel, _ in HALF} == {"forward", "dkdv", "dq"}
    for kernel in ("forward", "dkdv", "dq"):
        assert {f for k, f in HALF if k == kernel} == set(FAMILIES.values()) | {"generic"}
    assert all(tuple(row) == HEAD_DIMS for row in HALF.values())
    assert family("sm_86") == family("sm_89") == "ada" and family("sm_61") == family("") == "generic"


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "gfx942", "unknown", "interpreter"])
def test_tilings_do_not_depend_on_lengths_on_a_gpu(target: str) -> None:
    for kernel in KERNELS:
        found = {candidates(kernel, target, 64, 2, M, N) for M, N in itertools.product((1, 64, 10**6), repeat=2)}
        assert len(found) == (2 if target == "interpreter" else 1)


def test_entries_of_a_kind_fit_every_card_of_their_family() -> None:
    for (kernel, row, kind), tiles in SPECIAL.items():
        assert kind in KINDS and kind != "plain" and (kernel, row) in HALF
        itemsize = 4 if kind in ("ieee", "tf32", "tf32x3") else 2
        for D, config in tiles.items():
            for card in CARDS.values():
                if family(card.target) == row:
                    assert candidates(kernel, card.target, D, itemsize, 1024, 1024, kind)[0] == config
                    assert shared_memory(kernel, card, config, D, itemsize, kind) <= card.shared_per_cta


def test_a_kind_without_an_entry_takes_the_table() -> None:
    for kind, itemsize in (("window", 2), ("terms", 2), ("matrix", 2), ("ieee", 4), ("tf32", 4)):
        found = candidates("forward", "gfx942", 64, itemsize, 1024, 1024, kind)
        assert found == candidates("forward", "gfx942", 64, itemsize, 1024, 1024)
    assert candidates("dkdv", "sm_80", 64, 2, 1024, 1024, "terms")[0] != candidates("dkdv", "sm_80", 64, 2, 1024, 1024)[0]
    assert candidates("dbias", "sm_80", 64, 2, 9, 9, "matrix") == candidates("dq", "sm_80", 64, 2, 9, 9, "matrix")


def test_tiles_of_the_interpreter() -> None:
    """Small ones for short lengths, so that every loop is walked; few for long ones."""
    for kernel in KERNELS:
        assert candidates(kernel, "interpreter", 64, 4, 129, 60) == (Config(32, 32),)
        assert candidates(kernel, "interpreter", 64, 4, 60, 500) == (Config(128, 128),)
        assert candidates(kernel, "interpreter", 64, 4, 1024, 1024) == (Config(256, 512),)


def test_row_kernels_have_one_tiling() -> None:
    for target in ("sm_80", "interpreter", "unknown"):
        assert candidates("delta", target, 64, 2, 10, 10) == candidates("dsinks", target, 64, 2, 10, 10) == (DELTA,)
