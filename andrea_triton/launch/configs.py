"""Tile sizes per kernel, target, head dim and dtype. Data and pure lookups: nothing here asks a device.

Each entry names the query and key rows of a tile, warps and pipeline stages. A lookup gives the entry and then smaller ones, for
a launch that runs out of a resource. tests/launch/test_configs.py compiles entries against each card's shared memory.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """One tiling: BLOCK_M query rows and BLOCK_N key rows a tile, num_warps warps, num_stages pipeline stages, whether the
    tiles that a program keeps are held in registers (numerics.hold), whether one loop walks full blocks and edges, how many
    programs are to fit a multiprocessor's registers (0: as many as happen to), and whether what only edges need is made there
    and not kept in registers (forward and dkdv)."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int = 4
    num_stages: int = 2
    HELD: bool = False
    ONE_LOOP: bool = False
    programs: int = 0
    LEAN: bool = False

    def __str__(self) -> str:
        held, loop = ", held" if self.HELD else "", (", one lean loop" if self.LEAN else ", one loop") if self.ONE_LOOP else ""
        fit = f", {self.programs} fit" if self.programs else ""
        return f"{self.BLOCK_M}x{self.BLOCK_N}, {self.num_warps} warps, {self.num_stages} stages{held}{loop}{fit}"

    def registers(self) -> int | None:
        """Of a thread, at most, so that `programs` fit: of 65536, in steps of 8."""
        return 65536 // (32 * self.num_warps * self.programs) // 8 * 8 if self.programs else None


# Families of targets that share a table row. A name that is not here gets the generic one.
FAMILIES = {
    "sm_75": "turing",
    "sm_80": "ampere",
    "sm_86": "ada",
    "sm_87": "ada",
    "sm_89": "ada",
    "sm_90": "hopper",
    "sm_100": "blackwell",
    "sm_103": "blackwell",
    "sm_120": "blackwell rtx",
    "sm_121": "blackwell rtx",
    "gfx942": "cdna",
    "gfx950": "cdna",
    "gfx1100": "rdna",
}

C = Config


def H(BLOCK_M: int, BLOCK_N: int, num_warps: int = 4, num_stages: int = 2) -> Config:
    """A Config that holds what a program keeps in registers."""
    return Config(BLOCK_M, BLOCK_N, num_warps, num_stages, True)


def S(BLOCK_M: int, BLOCK_N: int, num_warps: int, num_stages: int, programs: int) -> Config:
    """A Config of a single loop, for so many programs on a multiprocessor."""
    return Config(BLOCK_M, BLOCK_N, num_warps, num_stages, False, True, programs)


def L(BLOCK_M: int, BLOCK_N: int, num_warps: int, num_stages: int, programs: int) -> Config:
    """The same, lean."""
    return S(BLOCK_M, BLOCK_N, num_warps, num_stages, programs)._replace(LEAN=True)


# (kernel, family) -> {head dim up to: Config}, for two-byte dtypes. Those of ampere, ada and hopper were chosen by a simulation
# of the compiled code clock by clock (counting/, Triton 3.9, bf16, causal, lengths 1k and 8k, hopper under two guesses of the
# bandwidth of L2): counts of instructions are blind to the latency that stages and more, smaller programs hide. The others were
# chosen by such counts. No spill in a main loop of a causal call for head dims 32, 64 and 128 on ampere, ada and hopper, but for
# ampere's forward at 128: 12 accesses, and 15 % faster than without; hopper's dk, dv at 32: 2; ampere's forward at 256: 5. Turing
# has no bf16 products and Triton gives it none for fp16 either: small tiles, plain arithmetic.
HALF = {
    ("forward", "generic"): {32: C(64, 32), 64: C(64, 32), 128: C(64, 32), 256: C(32, 32, 4, 1)},
    ("forward", "turing"): {32: C(32, 32, 4, 1), 64: C(32, 32, 4, 1), 128: C(32, 32, 8, 1), 256: C(16, 32, 8, 1)},
    ("forward", "ampere"): {32: C(64, 64, 4, 3), 64: C(128, 64), 128: C(128, 32), 256: C(64, 32, 4, 1)},
    ("forward", "ada"): {32: C(64, 32, 4, 3), 64: C(64, 32, 4, 3), 128: C(128, 16), 256: C(64, 32, 4, 1)},
    ("forward", "hopper"): {
        32: S(64, 64, 4, 2, 6),
        64: L(128, 64, 4, 3, 3),
        128: S(128, 64, 8, 2, 2),
        256: S(128, 64, 8, 2, 1),
    },
    ("forward", "blackwell"): {32: C(128, 64), 64: C(128, 64), 128: C(128, 64, 8), 256: C(128, 32, 8)},
    ("forward", "cdna"): {32: C(128, 64), 64: C(128, 64), 128: C(128, 32), 256: C(64, 32)},
    ("forward", "rdna"): {32: C(64, 32, 4, 1), 64: C(64, 32, 4, 1), 128: C(64, 16, 8, 1), 256: C(32, 16, 8, 1)},
    ("dkdv", "generic"): {32: C(32, 64), 64: C(32, 64), 128: C(32, 32), 256: C(16, 32, 4, 1)},
    ("dkdv", "turing"): {32: C(32, 32, 8, 1), 64: C(32, 32, 8, 1), 128: C(16, 32, 8, 1), 256: C(16, 16, 8, 1)},
    ("dkdv", "ampere"): {32: H(32, 128, 4, 3), 64: H(32, 64, 4, 4), 128: H(16, 128, 8), 256: C(16, 32)},
    ("dkdv", "ada"): {32: C(32, 64, 4, 3), 64: H(32, 64, 4, 3), 128: H(16, 128, 8), 256: C(32, 32, 8, 1)},
    ("dkdv", "hopper"): {
        32: L(64, 64, 4, 2, 4),
        64: L(64, 64, 4, 3, 3),
        128: S(32, 64, 4, 3, 2),
        256: S(32, 64, 8, 2, 1),
    },
    ("dkdv", "blackwell"): {32: C(64, 64, 4, 1), 64: C(64, 64, 4, 1), 128: C(64, 64, 8, 1), 256: C(32, 32, 8, 1)},
    ("dkdv", "cdna"): {32: C(64, 32), 64: C(32, 32), 128: C(32, 32), 256: C(16, 32)},
    ("dkdv", "rdna"): {32: C(16, 64, 4, 1), 64: C(16, 16, 4, 1), 128: C(16, 32, 8, 1), 256: C(16, 16, 8, 1)},
    ("dq", "generic"): {32: C(64, 32), 64: C(64, 32), 128: C(32, 32), 256: C(32, 16, 4, 1)},
    ("dq", "turing"): {32: C(32, 32, 8, 1), 64: C(32, 32, 8, 1), 128: C(32, 16, 8, 1), 256: C(16, 16, 8, 1)},
    ("dq", "ampere"): {32: H(128, 64), 64: H(128, 16), 128: H(128, 32, 8), 256: C(32, 16)},
    ("dq", "ada"): {32: C(64, 32, 4, 3), 64: C(64, 32, 4, 3), 128: C(128, 32, 8), 256: C(32, 16)},
    ("dq", "hopper"): {32: S(64, 64, 4, 2, 4), 64: S(128, 32, 4, 3, 3), 128: S(64, 32, 4, 2, 3), 256: S(128, 32, 8, 2, 1)},
    ("dq", "blackwell"): {32: C(64, 64), 64: C(64, 64), 128: C(64, 64, 8, 1), 256: C(32, 32, 8, 1)},
    ("dq", "cdna"): {32: C(64, 32), 64: C(64, 32), 128: C(32, 32), 256: C(32, 16)},
    ("dq", "rdna"): {32: C(64, 32, 8, 1), 64: C(64, 32, 8, 1), 128: C(32, 32, 8, 1), 256: C(16, 16, 8, 1)},
}
# The same, by kind of call, where it needs another tiling: more numbers live at once, or (ieee) plain arithmetic in place of
# matrix products. Where a kind has no entry here, two-byte calls take the table above, and wider elements smaller tiles of it.
SPECIAL = {
    ("dq", "ampere", "causal"): {64: C(128, 32)},
    ("forward", "ada", "terms"): {64: C(64, 32, 4, 3)},
    ("forward", "ampere", "dropout"): {64: C(64, 64, 4, 3)},
    ("forward", "ada", "dropout"): {64: C(64, 32, 4, 3)},
    ("dkdv", "ampere", "dropout"): {64: C(16, 128)},
    ("dq", "ampere", "dropout"): {64: C(128, 32)},
    ("dkdv", "ada", "dropout"): {64: C(16, 128)},
    ("dkdv", "ampere", "grouped"): {64: H(16, 128)},
    ("dkdv", "hopper", "dropout"): {64: S(32, 64, 4, 3, 3)},
    ("dkdv", "ampere", "terms"): {64: C(16, 128)},
    ("dkdv", "ada", "terms"): {64: C(16, 128)},
    ("forward", "ampere", "matrix"): {64: C(64, 64)},
    ("forward", "ada", "matrix"): {64: C(64, 32, 4, 3)},
    ("forward", "hopper", "matrix"): {32: S(64, 32, 4, 2, 4), 64: S(64, 64, 4, 2, 4), 128: S(64, 64, 4, 2, 2)},
    ("forward", "hopper", "slopes"): {64: S(64, 64, 4, 2, 5)},
    ("dkdv", "hopper", "slopes"): {64: S(64, 64, 4, 3, 3)},
    ("dq", "hopper", "slopes"): {64: S(128, 32, 4, 3, 3)},
    ("forward", "hopper", "capped"): {64: S(64, 64, 4, 2, 5)},
    ("dkdv", "hopper", "capped"): {64: S(32, 64, 4, 3, 4)},
    ("dq", "hopper", "capped"): {64: S(64, 64, 4, 2, 4)},
    ("forward", "hopper", "terms"): {64: C(64, 64)},
    ("dkdv", "hopper", "terms"): {64: S(32, 64, 4, 3, 3)},
    ("dq", "hopper", "terms"): {64: S(64, 64, 4, 3, 3)},
    ("forward", "hopper", "dropout"): {64: S(64, 64, 4, 3, 3)},
    ("dq", "hopper", "dropout"): {64: S(64, 64, 4, 3, 3)},
    ("dkdv", "hopper", "matrix"): {32: S(32, 64, 4, 3, 3), 64: S(32, 64, 4, 3, 3)},
    ("dq", "hopper", "matrix"): {32: S(64, 32, 4, 2, 3), 64: C(64, 64, 4, 3)},
    ("dkdv", "ampere", "matrix"): {64: C(32, 64, 4, 1)},
    ("dkdv", "ada", "matrix"): {64: C(32, 64, 4, 1)},
    ("dq", "ada", "dropout"): {64: C(64, 32, 4, 3)},
    ("dq", "ada", "terms"): {64: C(64, 32, 4, 3)},
    ("dq", "ada", "matrix"): {64: H(128, 16)},
    ("forward", "ampere", "ieee"): {32: C(64, 32), 64: C(64, 16), 128: C(32, 32, 4, 1)},
    ("forward", "ada", "ieee"): {32: C(64, 32), 64: C(64, 16), 128: C(32, 32, 8, 1)},
    ("forward", "hopper", "ieee"): {32: C(64, 32), 64: C(32, 32), 128: C(32, 32, 8, 1)},
    ("dkdv", "ampere", "ieee"): {32: C(32, 64), 64: C(16, 64), 128: C(16, 32, 4, 1)},
    ("dkdv", "ada", "ieee"): {32: C(32, 32, 4, 1), 64: C(16, 32, 4, 1), 128: C(16, 32, 4, 1)},
    ("dkdv", "hopper", "ieee"): {32: C(32, 32, 4, 1), 64: C(16, 32, 4, 1), 128: C(32, 32, 8, 1)},
    ("dq", "ampere", "ieee"): {32: C(64, 32), 64: C(64, 16), 128: C(64, 16, 8, 1)},
    ("dq", "ada", "ieee"): {32: C(64, 32), 64: C(64, 16), 128: C(64, 16, 8, 1)},
    ("dq", "hopper", "ieee"): {32: C(64, 32), 64: C(64, 16), 128: C(64, 16, 8, 1)},
    ("forward", "ampere", "tf32"): {64: C(128, 32), 128: C(64, 64, 8, 1)},
    ("forward", "ada", "tf32"): {64: C(128, 32), 128: C(64, 32, 8)},
    ("forward", "hopper", "tf32"): {64: C(64, 64)},
    ("dkdv", "ampere", "tf32"): {64: C(32, 64), 128: C(32, 32, 4, 1)},
    ("dkdv", "ada", "tf32"): {64: C(32, 32, 2), 128: C(32, 32, 4, 1)},
    ("dkdv", "hopper", "tf32"): {64: C(32, 64, 4, 1)},
    ("dq", "ampere", "tf32"): {64: C(64, 32)},
    ("dq", "ada", "tf32"): {64: C(64, 32), 128: C(32, 32, 8)},
    ("dq", "hopper", "tf32"): {32: C(64, 64, 4, 1), 64: C(64, 64, 4, 1), 128: C(32, 64, 4, 1)},
    ("forward", "ampere", "tf32x3"): {32: C(64, 32, 4, 1), 64: C(64, 32, 4, 1)},
    ("forward", "ada", "tf32x3"): {64: C(64, 32, 4, 1)},
    ("dkdv", "ada", "tf32x3"): {64: C(16, 64, 4, 1)},
    ("dq", "ada", "tf32x3"): {64: C(64, 16)},
    ("forward", "hopper", "tf32x3"): {32: C(64, 64), 64: S(64, 16, 4, 3, 3), 128: C(64, 16)},
    ("dkdv", "ampere", "tf32x3"): {32: C(32, 64, 4, 1), 64: C(16, 64, 4, 1)},
    ("dkdv", "hopper", "tf32x3"): {32: C(32, 64, 4, 1), 64: C(32, 64, 4, 1), 128: C(16, 64, 4, 1)},
    ("dq", "ampere", "tf32x3"): {32: C(64, 16, 4, 3), 64: C(64, 16, 4, 3)},
    ("dq", "hopper", "tf32x3"): {32: C(64, 32), 64: C(64, 32), 128: C(64, 32, 4, 1)},
}
# The consumer cards after ada take its tiles.
HALF.update({(kernel, "blackwell rtx"): HALF[kernel, "ada"] for kernel in ("forward", "dkdv", "dq")})
SPECIAL.update({(kernel, "blackwell rtx", kind): tiles for (kernel, row, kind), tiles in SPECIAL.items() if row == "ada"})
# plain: bare products, two bytes or eight; causal: the commonest of them, keys that end on the right only, and no sinks;
# grouped: like either, in two bytes, with fewer key heads. window: keys end on the left. slopes: ALiBi. dropout: with random
# numbers. capped: a softcap on bare products. terms: one beside others, the caller's score or mask. matrix: a bias or mask that
# is read element by element. ieee, tf32, tf32x3: fp32, by how it is multiplied.
KINDS = ("plain", "causal", "grouped", "window", "slopes", "dropout", "capped", "terms", "matrix", "ieee", "tf32", "tf32x3")
WIDER = {"capped": "terms"}  # whose entries a kind takes where it has none
SEARCHED = ("plain", "causal", "grouped", "ieee", "tf32", "tf32x3")  # the kinds that take what tune.use gives
# Family -> head dim up to which three TF32 products of fp32 are faster than its own.
THREE_PRODUCTS = {"ampere": 64, "hopper": 64}
# The kernels that run over the same tiles as another one.
SAME_TILES = {"dbias": "dq", "statistics": "dq"}
SMALLEST = Config(16, 16, 4, 1)
Entry = tuple[str, str, int, int]  # kernel, target, head dim up to, bytes of an element
# What tune.use has put in the place of the table: empty until somebody asks for it.
TUNED: dict[Entry, Config] = {}
DELTA = Config(64, 1)


def family(target: str) -> str:
    """The table row of a target: an exact name, else its generation's older relative, else generic."""
    return FAMILIES.get(target, "generic")


def three_products(target: str, D: int) -> bool:
    """Whether fp32 is multiplied faster by three TF32 products than by its own."""
    return THREE_PRODUCTS.get(family(target), 0) >= D


def bucket(D: int) -> int:
    """The head dim of the table whose tiles a head dim takes."""
    return next(d for d in (32, 64, 128, 256) if d >= D)


def _interpreter(M: int, N: int) -> Config:
    """Few, large tiles: the interpreter pays by the tile. Short lengths get small ones, so that every loop is walked."""
    longest = max(M, N)
    if longest <= 160:
        return Config(32, 32)
    return Config(128, 128) if longest <= 512 else Config(256, 512)


def candidates(kernel: str, target: str, D: int, itemsize: int, M: int, N: int, kind: str = "plain") -> tuple[Config, ...]:
    """Tilings to try for a kernel, best first.

    Args:
        kernel: forward, delta, dkdv, dq, dbias or statistics.
        target: sm_80, gfx942 ..., or interpreter.
        D: the larger of the two head dims.
        itemsize: bytes of an element of q, k and v.
        M, N: query and key lengths: for the interpreter's tiles only, for a new length compiles no new kernel on a GPU.
        kind: of KINDS.

    Returns:
        The table's entry, or what tune.use has put in its place, and then ever smaller ones.
    """
    if kernel in ("delta", "dsinks"):
        return (DELTA,)
    if target == "interpreter":
        return (_interpreter(M, N),)
    found = TUNED.get((kernel, target, bucket(D), itemsize)) if kind in SEARCHED else None
    first = found or _first(SAME_TILES.get(kernel, kernel), family(target), bucket(D), itemsize, kind)
    if kernel in SAME_TILES:  # the registers of the other kernel say nothing of this one's
        first = first._replace(programs=0)
    result = [first]
    while result[-1] != SMALLEST:
        result.append(_smaller(result[-1]))
    return tuple(result)


def _first(kernel: str, row: str, D: int, itemsize: int, kind: str) -> Config:
    """The table's entry."""
    own, wider = (SPECIAL.get((kernel, row, x), {}) for x in (kind, WIDER.get(kind, kind)))
    special = own.get(D, wider.get(D))
    if special is not None:
        return special
    first = HALF[kernel, row][D]
    for _ in range((itemsize // 2).bit_length() - 1):
        first = _smaller(first)._replace(HELD=False, ONE_LOOP=False, programs=0, LEAN=False)
    return first


def _smaller(config: Config) -> Config:
    """Half the larger side of the tile; at the end of that, one stage."""
    m, n = config.BLOCK_M, config.BLOCK_N
    if config.num_stages > 1 and max(m, n) <= 32:
        return config._replace(num_stages=1)
    if max(m, n) > 16:
        return config._replace(BLOCK_M=m // 2) if m >= n else config._replace(BLOCK_N=n // 2)
    return SMALLEST
