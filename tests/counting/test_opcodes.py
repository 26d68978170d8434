"""Classes of instructions, and the bytes and FLOP in one."""

import pytest

from andrea_triton.counting import opcodes
from andrea_triton.counting.assembly import Instruction

KINDS = {
    "mma": "HMMA.16816.F32.BF16 HGMMA.64x64x16.F32 UTCHMMA DMMA.884 v_mfma_f32_16x16x4_f32 v_wmma_f32_16x16x16_f16",
    "special": "MUFU.EX2 MUFU.RCP v_exp_f32_e32 v_log_f32_e32 v_rcp_f32_e32",
    "fp32": "FFMA FADD.FTZ FMUL v_fma_f32 v_mul_f32_e32 v_dual_add_f32",
    "packed": "FFMA2 FADD2 v_pk_mul_f32",
    "half": "HFMA2 HADD2.F32",
    "multiply": "IMAD IMAD.WIDE.U32",
    "integer": "FMNMX FMNMX3 F2FP.BF16.F32.PACK_AB ISETP.GE.AND LOP3.LUT v_max3_f32 v_cndmask_b32_e32 v_pk_add_u16",
    "shared": "LDS.U.128 LDSM.16.M88.4 STS.128 ds_read_b128 ds_store_b64",
    "shuffle": "SHFL.BFLY REDUX",
    "global": "LDG.E.128 LDGSTS.E.BYPASS.128 STG.E UTMALDG.2D RED.E global_load_dwordx4 buffer_load_dword",
    "spill": "LDL STL.64 LDL.LU scratch_load_dword scratch_store_b32",
    "tmem": "LDTM.x64 STTM.x32",
    "other": "BRA BAR.SYNC.DEFER_BLOCKING UIADD3 EXIT s_waitcnt s_add_i32",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    assert {opcode: opcodes.kind(opcode) for opcode in KINDS[kind].split()} == dict.fromkeys(KINDS[kind].split(), kind)


def test_shared_bytes() -> None:
    moved = {"LDS": 128, "LDS.64": 256, "STS.U8": 32, "STS.U16": 64, "LDSM.16.MT88": 128, "LDSM.16.M88.2": 256}
    assert {opcode: opcodes.shared_bytes(opcode) for opcode in moved} == moved


def test_tmem_registers() -> None:
    moved = {"LDTM.x64": 64, "STTM": 1, "FADD": 0, "v_mfma_f32_4x4x4_16b_f16": 0}
    assert {opcode: opcodes.tmem_registers(opcode) for opcode in moved} == moved


@pytest.mark.parametrize(
    ("opcode", "shape", "slowness"),
    [
        ("HMMA.16816.F32.BF16", (16, 8, 16), 1),
        ("HMMA.1688.F32.TF32", (16, 8, 8), 2),
        ("DMMA.884", (8, 8, 4), 16),
        ("DMMA.8x8x4", (8, 8, 4), 16),
        ("HGMMA.64x128x16.F32", (64, 128, 16), 1),
        ("v_mfma_f32_32x32x8_bf16_1k", (32, 32, 8), 1),
        ("v_mfma_f32_32x32x2_f32", (32, 32, 2), 8),
        ("v_wmma_f32_16x16x16_bf16", (16, 16, 16), 1),
    ],
)
def test_product_shapes(opcode: str, shape: tuple[int, int, int], slowness: int) -> None:
    assert opcodes.product_shapes(Instruction("0x0", opcode), {}) == [shape]
    assert opcodes.slowness(opcode) == slowness


def test_tensor_memory_products_take_their_shape_from_the_ptx() -> None:
    first, second = 8 << 24 | 8 << 17, 4 << 24 | 16 << 17
    ptx = (
        f"mov.b32 %r7, {first};\n@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r7, %p2;\n"
        f"@%p1 tcgen05.mma.cta_group::1.kind::tf32 [ %r2 + 0 ], [ %r3 + 0 ], %rd3, {second}, %p2;"
    )
    tensor = opcodes.tensor_shapes(ptx)
    assert tensor == {False: {(128, 64, 16)}, True: {(64, 128, 8)}}
    from_shared = Instruction("0x0", "UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0")
    from_tensor_memory = Instruction("0x0", "UTCHMMA", "tmem[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0")
    assert opcodes.product_shapes(from_shared, tensor) == [(128, 64, 16)]
    assert opcodes.product_shapes(from_tensor_memory, tensor) == [(64, 128, 8)]


def test_where_a_warpgroup_product_takes_a_from() -> None:
    assert not opcodes.from_registers(Instruction("0x0", "HGMMA.64x64x16.F32", "R24, gdesc[UR16], R24, gsb0"))
    assert opcodes.from_registers(Instruction("0x0", "HGMMA.64x64x16.F32", "R88, R120, gdesc[UR16].tnspB, R88"))
