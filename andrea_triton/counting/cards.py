"""The cards that kernels are compiled for: their limits, and the rates that the cycle model of machine_code.py uses.

Pure data. One product stands for each target; its clock and its number of SMs scale the modelled TFLOP/s only. "SM" is
AMD's compute unit on gfx942, and on gfx1100 a pair of compute units (WGP), which share one LDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

KIB = 1024


@dataclass(frozen=True)
class Card:
    """What one SM of a card holds, and how much it does per clock.

    Args:
        target: name of the compilation target, such as sm_80 or gfx942.
        name: the product that stands for the target.
        warp_size: lanes of a warp (wavefront).
        shared_per_cta: shared memory (LDS) that one CTA may ask for, bytes.
        shared_per_sm: shared memory (LDS) of an SM, bytes.
        shared_reserved: shared memory that the system takes from each CTA, bytes.
        registers: 32-bit registers of an SM.
        register_unit: registers are allocated to a warp in multiples of this.
        threads: most resident threads of an SM.
        ctas: most resident CTAs of an SM.
        fp32_lanes: lanes that do fp32 arithmetic per clock.
        exp2_lanes: lanes of the special-function unit per clock.
        shared_bytes: bytes per clock that shared memory moves.
        mma_flops: FLOP per clock of dense 16-bit matrix products, fp32 accumulation, by the card's widest instruction.
        mma_sync_flops: the same for products issued by one warp (mma.sync); equal where there is no wider instruction.
        mma_f16_flops: the same for mma.sync with fp16 accumulation.
        sms: number of SMs.
        ghz: boost clock, GHz.
    """

    target: str
    name: str
    warp_size: int
    shared_per_cta: int
    shared_per_sm: int
    shared_reserved: int
    registers: int
    register_unit: int
    threads: int
    ctas: int
    fp32_lanes: int
    exp2_lanes: int
    shared_bytes: int
    mma_flops: int
    mma_sync_flops: int
    mma_f16_flops: int
    sms: int
    ghz: float


def _nvidia(
    capability: int,
    name: str,
    *,
    shared: tuple[int, int],
    resident: tuple[int, int],
    fp32_lanes: int,
    mma: tuple[int, int, int],
    sms: int,
    ghz: float,
) -> Card:
    """An NVIDIA card: shared = KiB (CTA, SM), resident = (threads, CTAs), mma = FLOP per clock (widest, sync, f16)."""
    turing = capability == 75
    return Card(
        target=f"sm_{capability}",
        name=name,
        warp_size=32,
        shared_per_cta=shared[0] * KIB,
        shared_per_sm=shared[1] * KIB,
        shared_reserved=0 if turing else KIB,
        registers=65536,
        register_unit=256,
        threads=resident[0],
        ctas=resident[1],
        fp32_lanes=fp32_lanes,
        exp2_lanes=16,
        shared_bytes=64 if turing else 128,
        mma_flops=mma[0],
        mma_sync_flops=mma[1],
        mma_f16_flops=mma[2],
        sms=sms,
        ghz=ghz,
    )


_SMALL = (99, 100)
_LARGE = (227, 228)
_GEFORCE = (512, 512, 1024)

_NVIDIA = (
    _nvidia(75, "T4", shared=(64, 64), resident=(1024, 16), fp32_lanes=64, mma=(1024, 1024, 1024), sms=40, ghz=1.59),
    _nvidia(80, "A100", shared=(163, 164), resident=(2048, 32), fp32_lanes=64, mma=(2048,) * 3, sms=108, ghz=1.41),
    _nvidia(86, "RTX 3060", shared=_SMALL, resident=(1536, 16), fp32_lanes=128, mma=_GEFORCE, sms=28, ghz=1.78),
    _nvidia(89, "RTX 4090", shared=_SMALL, resident=(1536, 24), fp32_lanes=128, mma=_GEFORCE, sms=128, ghz=2.52),
    # mma.sync reaches 62 % of what wgmma does (arXiv 2402.13499).
    _nvidia(90, "H100", shared=_LARGE, resident=(2048, 32), fp32_lanes=128, mma=(4096, 2540, 2540), sms=132, ghz=1.755),
    # The mma.sync rate of sm_100 is a guess.
    _nvidia(100, "B200", shared=_LARGE, resident=(2048, 32), fp32_lanes=128, mma=(8192, 2048, 2048), sms=148, ghz=1.85),
    _nvidia(120, "RTX 5090", shared=_SMALL, resident=(1536, 24), fp32_lanes=128, mma=_GEFORCE, sms=170, ghz=2.41),
)

_MI300X = Card(
    target="gfx942",
    name="MI300X",
    warp_size=64,
    shared_per_cta=64 * KIB,
    shared_per_sm=64 * KIB,
    shared_reserved=0,
    registers=4 * 512 * 64,
    register_unit=8 * 64,
    threads=2048,
    ctas=16,
    fp32_lanes=64,
    exp2_lanes=16,
    shared_bytes=128,
    mma_flops=2048,
    mma_sync_flops=2048,
    mma_f16_flops=2048,
    sms=304,
    ghz=2.1,
)

_RX7900 = Card(
    target="gfx1100",
    name="RX 7900 XTX",
    warp_size=32,
    shared_per_cta=64 * KIB,
    shared_per_sm=128 * KIB,
    shared_reserved=0,
    registers=4 * 1536 * 32,
    register_unit=24 * 32,
    threads=2048,
    ctas=32,
    fp32_lanes=128,
    exp2_lanes=32,
    shared_bytes=256,
    mma_flops=1024,
    mma_sync_flops=1024,
    mma_f16_flops=1024,
    sms=48,
    ghz=2.5,
)

CARDS: Mapping[str, Card] = MappingProxyType({card.target: card for card in (*_NVIDIA, _MI300X, _RX7900)})
"""The cards by target.

Example:
    >>> CARDS["sm_86"].shared_per_cta // KIB
    99
"""
