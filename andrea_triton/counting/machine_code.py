"""What a compiled kernel will cost, read from its machine code, without running it: registers, spills, shared memory,
CTAs per SM, and the instructions and modelled cycles of one trip through each main loop.

The model counts what each pipe of an SM takes per clock (cards.py), and knows nothing of latency, caches, bank
conflicts, prologue, epilogue or masks. `overlap` is the slowest pipe alone. `serial` adds to the matrix pipe the
slowest of the others, as if the softmax of a warp never ran under its own products and nothing else hid it.

NVIDIA: 4 warp-instructions issued per clock; 64 lanes for integer instructions, compares, selects, maxima and
conversions; integer multiplies take the fp32 pipe, 64 lanes; a packed fp32 instruction takes two slots of that pipe.
Products of more than one warp read their operands from shared memory. Tensor memory moves one register per warp and
clock in each quarter of an SM (a guess). AMD: matrix, special-function and vector instructions only; `serial` is their
sum.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from andrea_triton.counting import opcodes
from andrea_triton.counting.assembly import Instruction, Listing, Trip, main_loops, parse_amd, parse_nvidia
from andrea_triton.counting.cards import Card
from andrea_triton.counting.steps import Control, controls
from andrea_triton.errors import CompileError

_INTEGER_LANES = 64
_ISSUE = 4
_TMEM_COLUMNS = 512
_OPERAND_BYTES = 32


class Compiled(Protocol):
    """The part of Triton's CompiledKernel that is read here."""

    @property
    def asm(self) -> Mapping[str, Any]: ...

    @property
    def metadata(self) -> Any: ...


@dataclass(frozen=True)
class Loop:
    """One trip through an innermost loop that holds matrix products, or more than four exponentials.

    Instructions are counted per warp, on the shortest path among those with the most products.

    Args:
        head: where the loop starts: address (NVIDIA), line of the assembly (AMD).
        mma: matrix products.
        exp2: exponentials.
        fp32: fp32 additions, multiplications and fused ones, packed ones too.
        integer: integer instructions, compares, selects, maxima, conversions and moves.
        shared: loads and stores of shared memory.
        shuffles: exchanges between lanes (NVIDIA).
        global_: loads, stores and asynchronous copies of global memory.
        spills: loads and stores of spilled registers, on any path through the loop.
        total: all instructions.
        longest: all instructions of the longest path among those with the most products.
        cycles: cycles that one CTA's trip keeps each pipe of an SM busy.
        limit: the pipe that is busy longest.
        tiles: score tiles that one trip computes; more than it needs where warps repeat each other's products, 0 where
            there is no product.
        overlap: cycles per score element if all pipes overlap; nan without tiles.
        serial: cycles per score element if matrix products overlap with nothing; nan without tiles.
        overlap_tflops: TFLOP/s of the whole card at `overlap`; nan without tiles.
        serial_tflops: TFLOP/s of the whole card at `serial`; nan without tiles.
    """

    head: str
    mma: int
    exp2: int
    fp32: int
    integer: int
    shared: int
    shuffles: int
    global_: int
    spills: int
    total: int
    longest: int
    cycles: Mapping[str, float]
    limit: str
    tiles: float
    overlap: float
    serial: float
    overlap_tflops: float
    serial_tflops: float


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel on a card.

    Args:
        target: compilation target.
        registers: 32-bit registers per thread (AMD: vector registers, accumulators included).
        spill_loads: instructions that load spilled registers, in the whole kernel.
        spill_stores: instructions that store spilled registers, in the whole kernel.
        spills_in_loops: both kinds, inside `loops`.
        shared_memory: shared memory of a CTA, bytes.
        shared_limit: the most that the card gives a CTA, bytes.
        ctas_per_sm: CTAs that an SM holds at once; 0 if the kernel does not fit the card.
        mma_kinds: opcodes of the matrix products in the kernel, sorted.
        loops: its main loops, in the order of the text.
    """

    target: str
    registers: int
    spill_loads: int
    spill_stores: int
    spills_in_loops: int
    shared_memory: int
    shared_limit: int
    ctas_per_sm: int
    mma_kinds: tuple[str, ...]
    loops: tuple[Loop, ...]


def read(compiled: Compiled, card: Card, *, num_warps: int, tile: tuple[int, int], matmul_dims: Sequence[int]) -> MachineCode:
    """Resources and main loops of a kernel that was compiled ahead of time.

    Args:
        compiled: Triton's CompiledKernel.
        card: the card that it was compiled for.
        num_warps: warps that run the loops; warps that Triton adds for other work count in the occupancy only.
        tile: (BLOCK_M, BLOCK_N), the score elements of one tile.
        matmul_dims: for each product of a tile, its dimension beside BLOCK_M and BLOCK_N, as padded: (D, DV) in the
            forward, (D, DV, DV, D) in dk/dv, (D, DV, D) in dq.

    Returns:
        A MachineCode.

    Raises:
        CompileError: compiled for another target, or NVIDIA's disassembler is missing.
    """
    target = compiled.metadata.target
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    if name != card.target:
        raise CompileError(f"compiled for {name}, read as {card.target}: give the card of {name}")
    if target.backend == "cuda":
        listing, _, registers = disassemble(compiled.asm["cubin"])
        tensor = opcodes.tensor_shapes(compiled.asm["ptx"])
    else:
        text = compiled.asm["amdgcn"]
        listing, registers, tensor = parse_amd(text), _number(r"\.vgpr_count:\s+(\d+)", text), {}
    trips = main_loops(listing, opcodes.is_product, opcodes.is_exponential, opcodes.is_wait)
    loops = tuple(_loop(trip, card, num_warps, tensor, tile, matmul_dims) for trip in trips)
    return _describe(compiled.metadata, card, listing, registers, loops)


def _describe(metadata: Any, card: Card, listing: Listing, registers: int, loops: tuple[Loop, ...]) -> MachineCode:
    names = [instruction.opcode for instruction in listing.instructions]
    return MachineCode(
        target=card.target,
        registers=registers,
        spill_loads=sum(map(opcodes.is_spill_load, names)),
        spill_stores=sum(map(opcodes.is_spill_store, names)),
        spills_in_loops=sum(loop.spills for loop in loops),
        shared_memory=metadata.shared,
        shared_limit=card.shared_per_cta,
        ctas_per_sm=ctas_per_sm(
            card,
            registers=registers,
            shared=metadata.shared,
            num_warps=metadata.num_warps,
            tmem=getattr(metadata, "tmem_size", None) or 0,
        ),
        mma_kinds=tuple(sorted({name for name in names if opcodes.is_product(name)})),
        loops=loops,
    )


def ctas_per_sm(card: Card, *, registers: int, shared: int, num_warps: int, tmem: int = 0) -> int:
    """CTAs that an SM holds at once.

    Args:
        card: the card.
        registers: 32-bit registers per thread.
        shared: shared memory of a CTA, bytes.
        num_warps: warps of a CTA.
        tmem: columns of tensor memory of a CTA, of the 512 of an SM.

    Returns:
        The count; 0 if a single CTA does not fit.

    Example:
        >>> from andrea_triton.counting.cards import CARDS
        >>> ctas_per_sm(CARDS["sm_80"], registers=255, shared=32768, num_warps=4)
        2
    """
    if shared > card.shared_per_cta:
        return 0
    per_warp = math.ceil(registers * card.warp_size / card.register_unit) * card.register_unit
    limits = [card.ctas, card.threads // (card.warp_size * num_warps)]
    if per_warp:
        limits.append(card.registers // (per_warp * num_warps))
    if shared + card.shared_reserved:
        limits.append(card.shared_per_sm // (shared + card.shared_reserved))
    if tmem:
        limits.append(_TMEM_COLUMNS // tmem)
    return min(limits)


class Disassembly(NamedTuple):
    """An NVIDIA binary: its instructions, the control bits of each, registers per thread."""

    listing: Listing
    controls: Sequence[Control]
    registers: int


def disassemble(cubin: bytes) -> Disassembly:
    """What an NVIDIA binary says.

    Raises:
        CompileError: a tool is missing, or cannot read the binary.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = _run("nvdisasm", "-c", "-hex", str(path))
        registers = _number(r"\bREG:(\d+)", _run("cuobjdump", "--dump-resource-usage", str(path)))
    return Disassembly(parse_nvidia(text), controls(text), registers)


def _run(tool: str, *arguments: str) -> str:
    """What one of NVIDIA's tools prints. Triton ships them; the CUDA toolkit on PATH has them too."""
    package = find_spec("triton")
    shipped = Path(package.origin).parent / "backends/nvidia/bin" / tool if package and package.origin else Path(tool)
    found = str(shipped) if shipped.is_file() else shutil.which(tool)
    if found is None:
        raise CompileError(
            f"{tool} is missing: wanted it at {shipped}, where Triton's wheels have it, or on PATH. Machine code "
            "of NVIDIA cannot be read without it: reinstall triton from a wheel, or put the CUDA toolkit's bin on PATH"
        )
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{tool} cannot read the binary: {done.stderr.strip()}. Its version must know the target")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise CompileError(f"no register count ({pattern}) in the compiler's output; Triton 3.6 and 3.9 print it")
    return int(found[1])


def _loop(trip: Trip, card: Card, warps: int, tensor: opcodes.Shapes, tile: tuple[int, int], matmul_dims: Sequence[int]) -> Loop:
    names = [instruction.opcode for instruction in trip.light]
    count = Counter(map(opcodes.kind, names))
    flops = sum(_flops(instruction, warps, tensor) for instruction in trip.light) * warps
    model = _nvidia_cycles if card.target.startswith("sm_") else _amd_cycles
    cycles, serial = model(trip.light, card, warps, tensor)
    limit = max(cycles, key=cycles.__getitem__)
    tiles = flops / (2 * tile[0] * tile[1] * sum(matmul_dims))
    scores, speed = tile[0] * tile[1] * tiles or math.nan, (flops or math.nan) * card.sms * card.ghz / 1e3
    return Loop(
        head=trip.head,
        mma=count["mma"],
        exp2=sum(map(opcodes.is_exponential, names)),
        fp32=count["fp32"] + count["packed"],
        integer=count["integer"] + count["multiply"],
        shared=count["shared"],
        shuffles=count["shuffle"],
        global_=count["global"],
        spills=sum(opcodes.kind(instruction.opcode) == "spill" for instruction in trip.body),
        total=len(names),
        longest=len(trip.heavy),
        cycles=cycles,
        limit=limit,
        tiles=tiles,
        overlap=cycles[limit] / scores,
        serial=serial / scores,
        overlap_tflops=speed / cycles[limit],
        serial_tflops=speed / serial,
    )


def _share(opcode: str, warps: int) -> int:
    """Warps that one matrix product belongs to: its own, the four of a warpgroup, or all of the CTA."""
    if not opcodes.is_wide(opcode):
        return 1
    return warps if opcode.startswith("UTC") else 4


def _flops(instruction: Instruction, warps: int, tensor: opcodes.Shapes) -> float:
    """FLOP of a matrix product, per warp; 0 for other instructions."""
    if not opcodes.is_product(instruction.opcode):
        return 0.0
    shapes = opcodes.product_shapes(instruction, tensor)
    return sum(2 * m * n * k for m, n, k in shapes) / len(shapes) / _share(instruction.opcode, warps)


def _operand_bytes(instruction: Instruction, warps: int, tensor: opcodes.Shapes) -> float:
    """Bytes that a wide matrix product reads from shared memory, per warp: B, and A unless it comes from registers."""
    if not (opcodes.is_product(instruction.opcode) and opcodes.is_wide(instruction.opcode)):
        return 0.0
    shapes = opcodes.product_shapes(instruction, tensor)
    rows = sum(n + m * (not opcodes.from_registers(instruction)) for m, n, _ in shapes) / len(shapes)
    return _OPERAND_BYTES * rows / _share(instruction.opcode, warps)


def _rate(opcode: str, card: Card) -> float:
    """FLOP per clock of an SM for one kind of matrix product."""
    narrow = card.mma_f16_flops if opcode.endswith(".F16") else card.mma_sync_flops
    return (card.mma_flops if opcodes.is_wide(opcode) else narrow) / opcodes.slowness(opcode)


def _nvidia_cycles(code: Sequence[Instruction], card: Card, warps: int, tensor: opcodes.Shapes) -> tuple[dict[str, float], float]:
    """(cycles of each pipe, cycles without overlap) of one CTA's trip."""
    count = Counter(opcodes.kind(instruction.opcode) for instruction in code)
    lanes = warps * card.warp_size
    moved = sum(opcodes.shared_bytes(instruction.opcode) for instruction in code) * warps / card.shared_bytes
    operands = sum(_operand_bytes(instruction, warps, tensor) for instruction in code) * warps / card.shared_bytes
    fp32 = (count["fp32"] + 2 * count["packed"] + count["half"]) * lanes / card.fp32_lanes
    cycles = {
        "mma": _mma_cycles(code, card, warps, tensor),
        "exp2": count["special"] * lanes / card.exp2_lanes,
        "fp32": fp32 + count["multiply"] * lanes / _INTEGER_LANES,
        "integer": count["integer"] * lanes / _INTEGER_LANES,
        "shared": moved + operands,
        "tmem": sum(opcodes.tmem_registers(instruction.opcode) for instruction in code) * warps / _ISSUE,
        "issue": len(code) * warps / _ISSUE,
    }
    others = max(moved, *(cycles[pipe] for pipe in ("exp2", "fp32", "integer", "issue")))
    return cycles, cycles["mma"] + others + cycles["tmem"]


def _amd_cycles(code: Sequence[Instruction], card: Card, warps: int, tensor: opcodes.Shapes) -> tuple[dict[str, float], float]:
    """(cycles of each pipe, cycles without overlap) of one CTA's trip."""
    count = Counter(opcodes.kind(instruction.opcode) for instruction in code)
    lanes = warps * card.warp_size
    cycles = {
        "mma": _mma_cycles(code, card, warps, tensor),
        "exp2": count["special"] * lanes / card.exp2_lanes,
        "vector": (count["fp32"] + count["packed"] + count["integer"]) * lanes / card.fp32_lanes,
    }
    return cycles, sum(cycles.values())


def _mma_cycles(code: Sequence[Instruction], card: Card, warps: int, tensor: opcodes.Shapes) -> float:
    return sum(_flops(i, warps, tensor) / _rate(i.opcode, card) for i in code) * warps
