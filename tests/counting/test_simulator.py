"""The simulator on tiny kernels, whose clocks can be added up by hand, and on one of ours."""

from collections.abc import Sequence

import pytest

from andrea_triton.counting import simulator
from andrea_triton.counting.calls import call
from andrea_triton.counting.clocks import CLOCKS
from andrea_triton.counting.course import Course
from andrea_triton.counting.simulate import Setting, speeds
from andrea_triton.counting.simulator import Kernel, play
from andrea_triton.counting.steps import Control, Step
from andrea_triton.errors import CompileError

CARD = CLOCKS["sm_90"]._replace(launch=0.0)
END = (Step("other", 1), Control(1, 7, 7, 0))
Line = tuple[Step, Control]


def line(unit: str, interval: float = 1, latency: float = 0, size: int = 0, extra: int = 0, *, stall: int = 1, writes: int = 7,
         waits: int = 0) -> Line:  # fmt: skip
    """An instruction that takes a unit."""
    return Step(unit, interval, latency, size, extra), Control(stall, writes, 7, waits)


def clocks(code: Sequence[Line], warps: int = 1, resident: int = 1, programs: int = 1, tile_bytes: int = 0) -> float:
    """Clocks from the first instruction to the last of straight code, without the chance by which programs begin late."""
    steps, controls = zip(*code, END, strict=True)
    route = Course((tuple(range(len(steps))),))
    kernel = Kernel(route, steps, controls, warps, resident, tile_bytes)
    empty = Kernel(Course(((0,),)), [END[0]], [END[1]], warps, resident)
    return play(kernel, CARD, [()] * programs).clocks - play(empty, CARD, [()] * programs).clocks


def test_a_chain_obeys_the_stall_counts() -> None:
    """Dependent FFMA: ptxas writes 4 clocks between them."""
    assert clocks([line("fma", 1, stall=4)] * 100) == 400


def test_a_pipe_takes_one_instruction_per_interval() -> None:
    """m16n8k16 on an A100's tensor pipe, 8 clocks each; the last one's interval nobody waits for."""
    assert clocks([line("tensor", 8)] * 64) == 63 * 8 + 1
    assert clocks([line("special", 8)] * 10, warps=4) == 9 * 8 + 1, "each scheduler has its own pipe"
    assert clocks([line("special", 8)] * 10, warps=8) == 19 * 8, "two warps share one"


def test_who_waits_for_a_scoreboard_waits_for_the_latency() -> None:
    load = line("shared", 4, CARD.shared, 128, stall=2, writes=0)
    assert clocks([load, line("fma", 1, waits=1)]) == 1 + CARD.shared + 1, "one clock of the port, then the latency"
    assert clocks([load, line("fma", 1)]) == 3


def test_copies_are_waited_for_by_groups() -> None:
    """Of two groups, DEPBAR 1 waits for the first, DEPBAR 0 for both; they share the bandwidth of L2."""
    copy, commit = line("copy", 4, CARD.load, 512), line("commit")
    first, second = (clocks([copy, commit, copy, commit, line("copy wait", extra=n), line("fma")]) for n in (1, 0))
    assert first == pytest.approx(512 / CARD.l2 + CARD.load + 2)
    assert second == pytest.approx(first + 512 / CARD.l2)


def test_a_bulk_copy_lands_after_its_latency() -> None:
    found = clocks([line("bulk", 1, CARD.bulk), line("poll", 1, 20), line("fma")], warps=4, tile_bytes=8192)
    assert found == pytest.approx(CARD.bulk + 8192 / CARD.l2 + 2)


def test_a_poll_for_a_copy_that_nobody_starts_is_an_error() -> None:
    with pytest.raises(CompileError, match="every warp waits for ever"):
        clocks([line("poll", 1, 20)])


def test_wide_products_run_beside_the_warps() -> None:
    """64x64x16 takes 32 clocks of a scheduler's quarter; the wait is for the last of the group."""
    products = [line("wgmma", 32, 0, 2048)] * 3 + [line("wgmma", 32, 0, 2048, 1)]
    assert clocks([*products, line("wgmma wait"), line("fma")], warps=4) == 4 * 32 + CARD.wgmma + 2
    assert clocks([*products, line("fma")], warps=4) == 5


def test_a_barrier_lets_go_after_the_last_warp() -> None:
    assert clocks([line("barrier"), line("fma")], warps=4) == CARD.barrier + 1


def test_programs_that_do_not_fit_wait_for_those_that_do() -> None:
    """Latency is hidden by more programs at once, not by more after each other."""
    code = [line("shared", 4, 1000, 128, writes=0), line("fma", 1, waits=1)]
    alone, together, after = (clocks(code, resident=r, programs=p) for r, p in ((1, 1), (4, 4), (1, 4)))
    assert together < 1.1 * alone and after > 3.9 * alone


def test_trips_repeat_the_loop_and_loads_of_later_trips_are_off() -> None:
    """A loop that copies for the next trip: of 5 trips the last copies nothing. A trip waits for the copy of the trip before, so
    two trips take one latency and the chains of both, 40 clocks each."""
    copy = [line("copy", 4, CARD.load, 512), line("commit")]
    body = [*copy, line("copy wait", extra=1), *[line("fma", 1, stall=4)] * 10]
    code = [*copy, *body, END]
    steps, controls = zip(*code, strict=True)
    route = Course(((0, 1), tuple(range(2, 2 + len(body))), (len(code) - 1,)))
    found = {t: play(Kernel(route, steps, controls, 1, 1), CARD, [(t,)]).clocks for t in (0, 1, 5, 50)}
    each = (CARD.load + 512 / CARD.l2 + 40) / 2
    assert found[0] < found[1] < found[5] and (found[50] - found[5]) / 45 == pytest.approx(each, rel=0.05)


def test_without_a_compiler_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator.shutil, "which", lambda name: None)
    simulator._library.cache_clear()
    with pytest.raises(CompileError, match="none of cc, gcc and clang is on PATH; install one"):
        simulator._library()
    simulator._library.cache_clear()


@pytest.mark.parametrize("kernel", ["forward", pytest.param("dkdv", marks=pytest.mark.slow)])
def test_chance_changes_little(kernel: str) -> None:
    (launch,) = call("sm_80", 64, "bf16", "causal", 1024, kernel)
    found = [speeds(launch, "sm_80", Setting(CLOCKS["sm_80"], seed=seed, shapes=((1024, 192),))) for seed in (1, 2, 3)]
    values = [x[0] for x in found if x]
    assert len(values) == 3 and max(values) < 1.03 * min(values) and min(values) > 100
