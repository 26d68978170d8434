"""What each instruction is to the simulator: the unit that it takes and for how long, and the control bits that ptxas wrote."""

from __future__ import annotations

import re
from typing import NamedTuple

from andrea_triton.counting import opcodes
from andrea_triton.counting.assembly import Instruction
from andrea_triton.counting.clocks import Clocks

UNITS = (
    "tensor", "wgmma", "fma", "alu", "special", "shared", "copy", "load", "store", "bulk", "commit", "copy wait", "wgmma wait",
    "barrier", "poll", "other",
)  # fmt: skip
"""As the simulator numbers them."""
_ADDRESS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/.*/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_GROUPS = re.compile(r"0x([0-9a-f]+)")
_CONVERSIONS = ("F2I", "I2F", "F2F", "FRND")


class Control(NamedTuple):
    """What ptxas tells the scheduler: clocks until the warp may issue again; the scoreboard that is set until the result is
    written, and the one until the operands are read (7: none); a mask of those to wait for.

    Source: arXiv 2503.20481; bits 105 to 125 of an instruction."""

    stall: int
    writes: int
    reads: int
    waits: int


class Step(NamedTuple):
    """An instruction as the simulator takes it.

    Args:
        unit: of UNITS.
        interval: clocks until the unit takes another.
        latency: clocks until its result is there; 0 where nobody waits for it by a scoreboard.
        bytes: that it moves, of a warp; of a wide product the operands that its warpgroup reads.
        extra: groups that may be left under way (waits); 1 for a wide product that ends a group.
    """

    unit: str
    interval: float
    latency: float = 0.0
    bytes: int = 0
    extra: int = 0


def controls(text: str) -> list[Control]:
    """The control bits of every instruction, in order, from what `nvdisasm -c -hex` prints of the first kernel.

    Example:
        >>> controls(" /*0000*/ FFMA R0, R1, R2, R3 ; /* 0x0000000201007223 */\\n /* 0x004fe20000000003 */")
        [Control(stall=1, writes=7, reads=7, waits=4)]
    """
    found: list[Control] = []
    begun = False
    for line in text.splitlines():
        if line.lstrip().startswith(".section") and found:
            break
        if _ADDRESS.match(line):
            begun = True
        elif begun and (word := _UPPER.match(line)):
            bits, begun = int(word[1], 16) >> 41, False
            found.append(Control(bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63))
    return found


def step(instruction: Instruction, clocks: Clocks) -> Step:
    """The Step of an instruction on a card.

    Example:
        >>> from andrea_triton.counting.clocks import CLOCKS
        >>> step(Instruction("0x0", "MUFU.EX2", "R0, R1"), CLOCKS["sm_80"])
        Step(unit='special', interval=8, latency=17.0, bytes=0, extra=0)
    """
    opcode, kind, name = instruction.opcode, opcodes.kind(instruction.opcode), opcodes.base(instruction.opcode)
    if kind == "mma":
        return _product(instruction, clocks)
    if kind == "special" or name in _CONVERSIONS:
        return Step("special", 8, clocks.special)
    if kind in ("fp32", "packed", "half", "multiply"):
        return Step("fma", clocks.fp32 if kind == "fp32" else 2)
    if kind == "integer":
        return Step("alu", 2)
    if kind in ("shared", "shuffle", "spill", "global"):
        return _access(instruction, kind, clocks)
    if name == "LDGDEPBAR":
        return Step("commit", 1)
    if name == "DEPBAR" or opcode.startswith("WARPGROUP.DEPBAR"):
        groups = _GROUPS.search(instruction.operands)
        return Step("copy wait" if name == "DEPBAR" else "wgmma wait", 1, extra=int(groups[1], 16) if groups else 0)
    if name == "BAR":
        return Step("barrier", 1)
    if opcode.startswith("SYNCS.PHASECHK"):
        return Step("poll", 1, 20)
    return Step("other", 1, clocks.other)


def _product(instruction: Instruction, clocks: Clocks) -> Step:
    opcode = instruction.opcode
    if not opcodes.is_wide(opcode):
        half = "16816" not in opcode and "TF32" not in opcode  # TF32: half the products at half the rate
        return Step("tensor", clocks.tensor * (0.5 if half else 1))
    ((m, n, k),) = opcodes.product_shapes(instruction, {})
    operands = n * k * 2 + (0 if opcodes.from_registers(instruction) else m * k * 2)
    return Step("wgmma", n / 2, bytes=operands, extra=int("gsb0" in instruction.operands))


def _access(instruction: Instruction, kind: str, clocks: Clocks) -> Step:
    opcode, name = instruction.opcode, opcodes.base(instruction.opcode)
    width = next((size for text, size in ((".128", 16), (".64", 8), ("U16", 2)) if text in opcode), 4)
    if kind == "shuffle":
        return Step("shared", 4, clocks.shuffle, 128)
    if kind == "spill":
        return Step("shared", 4, 33, 128)
    if name in ("LDSM", "STSM"):
        matrices = opcodes.shared_bytes(opcode) // 128
        return Step("shared", 4, clocks.shared + 2 * (matrices - 1), 128 * matrices)
    if kind == "shared":
        return Step("shared", 4, clocks.shared, 32 * width)
    if name == "LDGSTS":
        few = width < 16 and instruction.guard  # numbers of a query each: few lanes are on
        return Step("copy", 1 if few else 4, clocks.load, 32 if few else 32 * width)
    if name in ("LDG", "LD", "ATOMG"):
        return Step("load", 4, clocks.load, 32 * width)
    if name.startswith("UTMALDG"):
        return Step("bulk", 1, clocks.bulk)
    return Step("store", 4, 20, 32 * width)
