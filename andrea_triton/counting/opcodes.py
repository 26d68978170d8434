"""What single instructions of NVIDIA's and AMD's machine code do: the class that each belongs to, the work in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from andrea_triton.counting.assembly import Instruction

_NVIDIA_CLASSES = {
    "mma": "HMMA HGMMA UTCHMMA IMMA DMMA QGMMA UTCQMMA UTCOMMA",
    "special": "MUFU",
    "fp32": "FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSWZADD",
    "packed": "FADD2 FMUL2 FFMA2",
    "half": "HADD2 HMUL2 HFMA2 HADD2_32I HFMA2_32I",
    "multiply": "IMAD IDP",
    "integer": "FMNMX FMNMX3 FSETP FSET FSEL FCHK F2FP HMNMX2 VHMNMX HSETP2 HSET2 IADD IADD3 VIADD VIADDMNMX IMNMX "
    "VIMNMX VIMNMX3 IABS ISETP I2FP LEA LEPC LOP LOP3 PLOP3 SHF SHL SHR SGXT BMSK PRMT SEL MOV MOV32I CS2R P2R R2P",
    "shared": "LDS LDSM STS STSM ATOMS",
    "shuffle": "SHFL REDUX MATCH",
    "global": "LD LDG LDGSTS ST STG ATOM ATOMG RED REDG UBLKCP UBLKRED",
    "spill": "LDL STL",
    "tmem": "LDT LDTM STT STTM UTCCP",
}
_NVIDIA = {opcode: kind for kind, opcodes in _NVIDIA_CLASSES.items() for opcode in opcodes.split()}

_AMD_CLASSES = (
    ("mma", re.compile(r"v_(mfma|wmma|swmmac|smfmac)_")),
    ("special", re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")),
    ("packed", re.compile(r"v_pk_\w*_f32")),
    ("fp32", re.compile(r"v_(dual_)?(add|sub|subrev|mul|fma|fmac|fmaak|fmamk|mac|mad)_f32")),
    ("integer", re.compile("v_")),
    ("shared", re.compile("ds_")),
    ("spill", re.compile("scratch_")),
    ("global", re.compile("(global|buffer|flat)_")),
)

_SYNC_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4), "884": (8, 8, 4)}
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "8": 1, "U8": 1, "S8": 1}
_TENSOR_K = {"f16": 16, "tf32": 8}

Shapes = Mapping[bool, Collection[tuple[int, int, int]]]
"""(M, N, K) of the tensor-memory products of a kernel, by whether A comes from tensor memory."""


def base(opcode: str) -> str:
    """An NVIDIA opcode without its suffixes."""
    return opcode.split(".", 1)[0]


def kind(opcode: str) -> str:
    """Class of an instruction: mma, special (functions), fp32, packed (two fp32), half, multiply (integer, on the fp32
    pipe), integer (also compares, selects, maxima, conversions), shared, shuffle, global, spill, tmem (tensor memory),
    other.

    Example:
        >>> kind("HMMA.16816.F32.BF16"), kind("FMNMX"), kind("v_exp_f32_e32"), kind("BAR.SYNC.DEFER_BLOCKING")
        ('mma', 'integer', 'special', 'other')
    """
    if opcode[0].islower():
        return next((name for name, pattern in _AMD_CLASSES if pattern.match(opcode)), "other")
    name = base(opcode)
    return "global" if name.startswith("UTMA") else _NVIDIA.get(name, "other")


def is_product(opcode: str) -> bool:
    return kind(opcode) == "mma"


def is_wide(opcode: str) -> bool:
    """Whether an NVIDIA matrix product belongs to more than one warp (wgmma, tcgen05)."""
    return base(opcode) in ("HGMMA", "QGMMA") or base(opcode).startswith("UTC")


def is_exponential(opcode: str) -> bool:
    return opcode.startswith(("MUFU.EX2", "v_exp_"))


def is_wait(opcode: str) -> bool:
    return "TRYWAIT" in opcode


def is_spill_load(opcode: str) -> bool:
    return opcode.startswith(("LDL", "scratch_load"))


def is_spill_store(opcode: str) -> bool:
    return opcode.startswith(("STL", "scratch_store"))


def shared_bytes(opcode: str) -> int:
    """Bytes that one NVIDIA instruction of a warp moves through shared memory; bank conflicts are not seen.

    Example:
        >>> [shared_bytes(opcode) for opcode in ("LDSM.16.M88.4", "LDGSTS.E.BYPASS.128", "LDS", "FADD")]
        [512, 512, 128, 0]
    """
    name, _, suffixes = opcode.partition(".")
    if name in ("LDS", "STS", "LDGSTS"):
        return 32 * next((_WIDTHS[s] for s in suffixes.split(".") if s in _WIDTHS), 4)
    if name in ("LDSM", "STSM"):
        return 128 * (int(opcode[-1]) if opcode[-2:] in (".2", ".4") else 1)
    return 128 if name == "SHFL" else 0


def tmem_registers(opcode: str) -> int:
    """Registers per lane that one instruction moves to or from tensor memory."""
    width = re.search(r"\.x(\d+)", opcode)
    return int(width[1]) if width and kind(opcode) == "tmem" else int(base(opcode) in ("LDTM", "STTM"))


def from_registers(instruction: Instruction) -> bool:
    """Whether a wide product takes its A operand from registers or tensor memory, not from shared memory."""
    if base(instruction.opcode) == "HGMMA":
        return re.match(r"R\d+\s*,\s*gdesc", instruction.operands) is None
    return instruction.operands.startswith("tmem")


def product_shapes(instruction: Instruction, tensor: Shapes) -> list[tuple[int, int, int]]:
    """(M, N, K) of a matrix product; more than one where tensor-memory products of a kernel cannot be told apart.

    Example:
        >>> product_shapes(Instruction("0x0", "HGMMA.64x128x16.F32.BF16"), {})
        [(64, 128, 16)]
    """
    opcode = instruction.opcode
    if base(opcode).startswith("UTC"):
        at = from_registers(instruction)
        return list(tensor.get(at) or tensor.get(not at) or [(128, 128, 16)])
    if opcode[0].isupper() and (short := re.search(r"\.(\d{3,5})(?=\.|$)", opcode)):
        return [_SYNC_SHAPES.get(short[1], (16, 8, 16))]
    sizes = re.search(r"(\d+)x(\d+)x(\d+)", opcode)
    return [(int(sizes[1]), int(sizes[2]), int(sizes[3]))] if sizes else [(16, 8, 16)]


def slowness(opcode: str) -> int:
    """How many times longer a product takes than one of 16-bit operands with the same FLOP: tf32 2, AMD's fp32 and fp64
    8, NVIDIA's fp64 16 (on data-centre cards; the others have almost no fp64)."""
    if opcode[0].islower():
        operand = opcode.removesuffix("_1k").rsplit("_", 1)[-1]
        return {"xf32": 2, "f32": 8, "f64": 8}.get(operand, 1)
    return 16 if base(opcode) == "DMMA" else 2 if "TF32" in opcode else 1


def tensor_shapes(ptx: str) -> Shapes:
    """Shapes of the tensor-memory products of a kernel, which its SASS does not show, from the constant instruction
    descriptors in its PTX: M / 16 in bits 24-28, N / 8 in bits 17-22.

    Source: PTX ISA, tcgen05 instruction descriptor.
    """
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+),\s*(-?\d+);", ptx))
    shapes: dict[bool, set[tuple[int, int, int]]] = {True: set(), False: set()}
    pattern = r"tcgen05\.mma\.cta_group::\d\.kind::(\w+)\s*\[[^\]]*\],\s*(\[[^\]]*\]|[^,\s]+),\s*[^,\s]+,\s*([^,\s]+),"
    for flavour, a, descriptor in re.findall(pattern, ptx):
        value = constants.get(descriptor, descriptor)
        if value.lstrip("-").isdigit():
            bits = int(value)
            m, n = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
            shapes[a.startswith("[")].add((m, n, _TENSOR_K.get(flavour, 16)))
    return shapes
