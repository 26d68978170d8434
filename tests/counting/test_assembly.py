"""Control flow of small hand-written kernels."""

from andrea_triton.counting import opcodes
from andrea_triton.counting.assembly import Trip, main_loops, natural_loops, parse_amd, parse_nvidia, split, successors
from andrea_triton.counting.assembly import visit as visit_blocks


def sass(*lines: str) -> str:
    """nvdisasm's form of instructions and labels."""
    text, address = [".headerflags none", '\t.section .text.kernel,"ax",@progbits', ".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join([*text, '\t.section .nv.info,"",@"SHT_CUDA_INFO"', "        /*0000*/ .word 0x1 ;"])


def nvidia_trips(*lines: str) -> tuple[Trip, ...]:
    return main_loops(parse_nvidia(sass(*lines)), opcodes.is_product, opcodes.is_exponential, opcodes.is_wait)


def names(instructions: tuple) -> list[str]:
    return [instruction.opcode for instruction in instructions]


def test_parse_nvidia_reads_guards_targets_and_the_first_kernel_only() -> None:
    listing = parse_nvidia(
        sass(
            ".L_x_0:",
            "@!P0 FADD R0, R1.reuse, -R2",
            "{ HMMA.16816.F32 R4, R8, R12, R4",
            "BRA.U !UP0, `(.L_x_1)",
            "BRA.DIV UR4, `(.L_x_1)",
            "@P1 EXIT",
            "@!P2 CALL.REL.NOINC `(.L_x_1)",
            "BRA `(.L_x_0)",
            ".L_x_1:",
            "EXIT",
        )
    )
    assert listing.labels == {".L_x_0": 0, ".L_x_1": 7}
    assert [(i.opcode, i.target, i.falls) for i in listing.instructions] == [
        ("FADD", None, True),
        ("HMMA.16816.F32", None, True),
        ("BRA.U", ".L_x_1", True),
        ("BRA.DIV", None, True),
        ("EXIT", None, True),
        ("CALL.REL.NOINC", ".L_x_1", True),
        ("BRA", ".L_x_0", False),
        ("EXIT", None, False),
    ]
    assert listing.instructions[1].operands == "R4, R8, R12, R4"
    assert listing.instructions[2].place == "0x20"


def test_blocks_and_their_successors() -> None:
    listing = parse_nvidia(sass("FADD R0, R0, R0", ".L_x_0:", "@P0 BRA `(.L_x_0)", "FADD R0, R0, R0", "EXIT"))
    blocks = split(listing)
    assert blocks == [range(0, 1), range(1, 2), range(2, 4)]
    assert successors(listing, blocks) == [[1], [1, 2], []]


def test_loops_are_nested_and_leave_out_what_only_leads_into_them() -> None:
    follow = [[1], [2], [2, 3], [1, 4], [], [2]]
    rank, closing = visit_blocks(follow)
    assert sorted(closing) == [(2, 2), (3, 1)]
    assert rank[0] < rank[1] < rank[2] < rank[3] < rank[4]
    assert natural_loops(follow, closing) == {1: frozenset({1, 2, 3}), 2: frozenset({2})}


def test_only_the_innermost_loop_with_products_counts() -> None:
    (trip,) = nvidia_trips(
        ".L_x_0:",
        "STL [R1], R2",
        ".L_x_1:",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "@P0 BRA `(.L_x_1)",
        "@P1 BRA `(.L_x_0)",
        ".L_x_2:",
        "FADD R0, R0, R0",
        "@P2 BRA `(.L_x_2)",
        "EXIT",
    )
    assert trip.head == "0x10"
    assert names(trip.light) == names(trip.heavy) == names(trip.body) == ["HMMA.16816.F32", "BRA"]


def test_paths_take_the_most_products_then_the_fewest_or_most_instructions() -> None:
    (trip,) = nvidia_trips(
        ".L_x_0:",
        "@P0 BRA `(.L_x_1)",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "@P1 BRA `(.L_x_2)",
        "LDL R0, [R1]",
        "BRA `(.L_x_2)",
        ".L_x_1:",
        "FADD R0, R0, R0",
        ".L_x_2:",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
    )
    assert names(trip.light) == ["BRA", "HMMA.16816.F32", "BRA", "BRA"]
    assert names(trip.heavy) == ["BRA", "HMMA.16816.F32", "BRA", "LDL", "BRA", "BRA"]
    assert len(trip.body) == 7


def test_polling_a_barrier_is_not_part_of_a_trip() -> None:
    (trip,) = nvidia_trips(
        ".L_x_0:",
        "HGMMA.64x64x16.F32 R24, gdesc[UR16], R24",
        ".L_x_1:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0",
        "@!P0 BRA `(.L_x_1)",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
    )
    assert names(trip.light) == names(trip.heavy) == ["HGMMA.64x64x16.F32", "BRA"]


def test_without_products_a_loop_of_exponentials_counts() -> None:
    few, many = (nvidia_trips(".L_x_0:", *["MUFU.EX2 R0, R0"] * n, "@P0 BRA `(.L_x_0)", "EXIT") for n in (4, 5))
    assert few == ()
    assert names(many[0].light) == ["MUFU.EX2"] * 5 + ["BRA"]


def test_amd_loop_whose_head_lies_behind_its_tail() -> None:
    text = "\n".join(
        [
            "kernel:",
            "\ts_branch .LBB0_2",
            ".LBB0_1:                ; in the loop",
            "\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]",
            "\ts_cbranch_scc0 .LBB0_3",
            ".LBB0_2:",
            "\ts_cbranch_execz .LBB0_1",
            "\tglobal_load_dword v0, v[1:2], off",
            "\ts_branch .LBB0_1",
            ".LBB0_3:",
            "\ts_endpgm",
            ".Lfunc_end0:",
            "\ts_branch .LBB0_1",
        ]
    )
    (trip,) = main_loops(parse_amd(text), opcodes.is_product, opcodes.is_exponential, opcodes.is_wait)
    assert sorted(names(trip.light)) == [
        "global_load_dword",
        "s_branch",
        "s_cbranch_execz",
        "s_cbranch_scc0",
        "v_mfma_f32_32x32x8_bf16_1k",
    ]
