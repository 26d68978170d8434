"""How long the parts of a multiprocessor (SM) take, in clocks: the numbers that simulator.py plays a kernel with. Pure data.

Sources: arXiv 2503.20481 (pipes, control bits, latencies of ampere; ada's are taken alike), arXiv 2402.13499 (hopper: wgmma, bulk
copies, shared memory), the latency tables of open compilers' drivers, NVIDIA's data sheets (SMs and clocks). The bandwidth of L2
per SM is a guess within what is published, and the weakest number: 24 bytes a clock is as likely on hopper as 34.6, so a choice
of tiles should hold under both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Clocks(NamedTuple):
    """One card.

    Args:
        name: the product.
        sms, ghz: how many multiprocessors, and their clock.
        load: from an instruction to data from L2, copies into shared memory alike.
        l2: bytes a clock that one SM gets from L2, as all of them ask.
        tensor: interval of a product m16n8k16 on the tensor pipe of a scheduler; 0.62 of wgmma's rate on hopper.
        fp32: interval of an fp32 instruction: 2 where a scheduler has 16 lanes for it, 1 where it has 32.
        bulk: from a bulk copy (TMA) to its data, 0 where there is none.
        wgmma: from the end of a wide product to who waits for it, 0 where there is none.
        special, shared, shuffle, other: from an instruction to its result: special functions, loads from shared memory, exchanges
            between lanes, all that has no entry.
        barrier: from the last warp that arrives to the first instruction behind.
        launch: from a free place to the first instruction of a program.
    """

    name: str
    sms: int
    ghz: float
    load: float
    l2: float
    tensor: float
    fp32: float
    bulk: float = 0.0
    wgmma: float = 0.0
    special: float = 17.0
    shared: float = 24.0
    shuffle: float = 24.0
    other: float = 20.0
    barrier: float = 24.0
    launch: float = 200.0


CLOCKS: Mapping[str, Clocks] = MappingProxyType(
    {
        "sm_80": Clocks("A100", 108, 1.41, load=262, l2=40, tensor=8, fp32=2),
        "sm_86": Clocks("RTX 3090", 82, 1.70, load=270, l2=16, tensor=32, fp32=1),
        "sm_89": Clocks("RTX 4090", 128, 2.52, load=273, l2=13.3, tensor=32, fp32=1),
        "sm_90": Clocks("H100", 132, 1.755, load=263, l2=34.6, tensor=6.45, fp32=1, bulk=433, wgmma=28),
    }
)
"""The cards that can be simulated, by target."""
