"""Resources and the cycle model: on hand-made instructions, and on a small kernel compiled for several targets."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from andrea_triton.counting import machine_code
from andrea_triton.counting.cards import CARDS
from andrea_triton.counting.machine_code import MachineCode, ctas_per_sm, read
from andrea_triton.errors import CompileError

TILE = (64, 64)
TARGETS = ["sm_80", "sm_90", "gfx942", "gfx1100"]


@triton.jit
def squares(x, y, out, steps, BLOCK: tl.constexpr, D: tl.constexpr):
    """Sum over steps of exp2(x yᵀ) y, tile by tile.
    Shapes: x [BLOCK,D] y [steps,BLOCK,D] out [BLOCK,D]
    Grid:   one program."""
    at = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
    x_tile = tl.load(x + at)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for i in range(steps):
        y_tile = tl.load(y + i * BLOCK * D + at)
        weights = tl.exp2(tl.dot(x_tile, tl.trans(y_tile)))
        acc = tl.dot(weights.to(y_tile.dtype), y_tile, acc)
    tl.store(out + at, acc)


def compiled(target: str) -> Any:
    pointer = {"x": "*bf16", "y": "*bf16", "out": "*fp32"}
    signature = {**pointer, "steps": "i32", "BLOCK": "constexpr", "D": "constexpr"}
    hints = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(squares, signature, constexprs={(4,): 64, (5,): 64}, attrs=hints)
    card = CARDS[target]
    cuda = target.startswith("sm_")
    machine = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, card.warp_size)
    return triton.compile(source, target=machine, options={"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True})


@pytest.fixture(scope="module")
def codes() -> dict[str, MachineCode]:
    return {t: read(compiled(t), CARDS[t], num_warps=4, tile=TILE, matmul_dims=(64, 64)) for t in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_a_compiled_loop(codes: dict[str, MachineCode], target: str) -> None:
    code, card = codes[target], CARDS[target]
    assert code.target == target
    assert 16 < code.registers <= 512
    assert 0 < code.shared_memory <= code.shared_limit == card.shared_per_cta
    assert (code.spill_loads, code.spill_stores, code.spills_in_loops) == (0, 0, 0)
    assert code.ctas_per_sm >= 1
    (loop,) = code.loops
    assert 1 <= loop.tiles <= 2
    assert loop.exp2 >= TILE[0] * TILE[1] // (4 * card.warp_size)
    assert loop.limit in loop.cycles
    assert 0 < loop.overlap <= loop.serial < math.inf
    assert loop.serial_tflops <= loop.overlap_tflops <= card.mma_flops * card.sms * card.ghz / 1e3
    assert loop.cycles["mma"] == pytest.approx(loop.tiles * TILE[0] * TILE[1] * 2 * (64 + 64) / card.mma_flops)
    assert loop.total <= loop.longest
    assert loop.total > loop.mma + loop.exp2 + loop.fp32 + loop.integer + loop.shared + loop.shuffles + loop.global_


def test_kinds_of_matrix_products(codes: dict[str, MachineCode]) -> None:
    assert {target: code.mma_kinds[0] for target, code in codes.items()} == {
        "sm_80": "HMMA.16816.F32.BF16",
        "sm_90": "HGMMA.64x64x16.F32.BF16",
        "gfx942": codes["gfx942"].mma_kinds[0],
        "gfx1100": "v_wmma_f32_16x16x16_bf16",
    }
    assert codes["gfx942"].mma_kinds[0].startswith("v_mfma_f32_32x32x8_bf16")
    assert codes["sm_80"].loops[0].mma == 2 * 64 * 64 * 64 // (16 * 8 * 16) // 4
    assert codes["sm_90"].loops[0].mma == 2 * 64 // 16


def test_a_report_is_frozen_and_becomes_json(codes: dict[str, MachineCode]) -> None:
    code = codes["sm_80"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        code.registers = 0  # type: ignore[misc]
    assert json.loads(json.dumps(dataclasses.asdict(code)))["loops"][0]["cycles"] == code.loops[0].cycles


def amd(*lines: str, target: str = "gfx942") -> SimpleNamespace:
    """What Triton's CompiledKernel would hold of a hand-written AMD kernel."""
    text = "\n".join([*lines, "\ts_endpgm", ".Lfunc_end0:", "    .vgpr_count:     100"])
    metadata = SimpleNamespace(target=SimpleNamespace(backend="hip", arch=target), shared=16384, num_warps=4)
    return SimpleNamespace(asm={"amdgcn": text}, metadata=metadata)


LOOP = [
    ".LBB0_1:",
    *["\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]"] * 8,
    *["\tv_exp_f32_e32 v0, v0"] * 4,
    *["\tv_fma_f32 v0, v0, v0, v0"] * 12,
    "\tscratch_load_dword v0, off, s0",
    "\ts_cbranch_scc1 .LBB0_1",
    "\tscratch_store_dword off, v0, s0",
]


def test_counts_and_cycles_of_a_hand_written_loop() -> None:
    code = read(amd(*LOOP), CARDS["gfx942"], num_warps=4, tile=(64, 32), matmul_dims=(64, 64))
    assert (code.registers, code.spill_loads, code.spill_stores, code.spills_in_loops) == (100, 1, 1, 1)
    assert code.mma_kinds == ("v_mfma_f32_32x32x8_bf16_1k",)
    (loop,) = code.loops
    assert (loop.head, loop.mma, loop.exp2, loop.fp32, loop.integer, loop.total) == ("line 2", 8, 4, 12, 0, 26)
    assert loop.cycles == {"mma": 256.0, "exp2": 64.0, "vector": 48.0} and loop.limit == "mma"
    assert loop.tiles == 1
    assert loop.overlap == 256 / 2048 and loop.serial == (256 + 64 + 48) / 2048
    assert loop.overlap_tflops == pytest.approx(2048 * 304 * 2.1 / 1e3)


def test_a_loop_without_products_has_cycles_but_no_speed() -> None:
    loop_of_exponentials = [".LBB0_1:", *["\tv_exp_f32_e32 v0, v0"] * 5, "\ts_cbranch_scc1 .LBB0_1"]
    code = read(amd(*loop_of_exponentials), CARDS["gfx942"], num_warps=4, tile=TILE, matmul_dims=(64, 64))
    (loop,) = code.loops
    assert (loop.tiles, loop.limit, loop.cycles["exp2"]) == (0, "exp2", 80)
    assert all(map(math.isnan, (loop.overlap, loop.serial, loop.overlap_tflops, loop.serial_tflops)))


@pytest.mark.parametrize(
    ("target", "registers", "shared", "num_warps", "tmem", "ctas"),
    [
        ("sm_80", 255, 32768, 4, 0, 2),
        ("sm_80", 168, 16384, 4, 0, 3),
        ("sm_80", 32, 0, 1, 0, 32),
        ("sm_80", 32, 80 * 1024, 4, 0, 2),
        ("sm_86", 64, 99 * 1024, 4, 0, 1),
        ("sm_86", 64, 100 * 1024, 4, 0, 0),
        ("sm_90", 24, 1024, 32, 0, 2),
        ("sm_100", 64, 1024, 4, 256, 2),
        ("sm_100", 64, 1024, 4, 768, 0),
        ("gfx942", 228, 16384, 4, 0, 2),
        ("gfx942", 166, 0, 4, 0, 3),
        ("gfx1100", 244, 8192, 8, 0, 2),
    ],
)
def test_ctas_per_sm(target: str, registers: int, shared: int, num_warps: int, tmem: int, ctas: int) -> None:
    card = CARDS[target]
    assert ctas_per_sm(card, registers=registers, shared=shared, num_warps=num_warps, tmem=tmem) == ctas


def test_another_card_is_refused() -> None:
    with pytest.raises(CompileError, match="compiled for gfx942, read as sm_80: give the card of gfx942"):
        read(amd(*LOOP), CARDS["sm_80"], num_warps=4, tile=TILE, matmul_dims=(64, 64))


def test_a_missing_tool_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "find_spec", lambda name: None)
    monkeypatch.setattr(machine_code.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match=r"nvdisasm is missing.*reinstall triton"):
        machine_code.disassemble(b"")


def test_a_binary_that_is_none_is_refused() -> None:
    with pytest.raises(CompileError, match="nvdisasm cannot read the binary"):
        machine_code.disassemble(b"not a cubin")
