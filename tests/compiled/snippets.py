"""Small PTX programs around the instructions under test."""

from collections.abc import Sequence

import numpy as np
import torch

from tests.compiled.global_memory import GlobalMemory
from tests.compiled.machine import Machine
from tests.compiled.parse import parse
from tests.compiled.values import Array

HEAD = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry snippet({parameters}) .reqntid {threads}
{{
.reg .pred %p<20>; .reg .b16 %rs<40>; .reg .b32 %r<60>; .reg .b64 %rd<40>;
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
{addresses}
{body}
ret;
}}
"""


def run(body: str, arrays: Sequence[Array], threads: int = 32, shared: int = 0, grid: tuple[int, int] = (1, 1)) -> list[Array]:
    """Run a body with %r0 the thread, %r1 the block and %rd0, %rd1 .. the addresses of copies of the arrays. Gives the copies.

    Args:
        body: PTX.
        arrays: of any dtype that numpy and torch share as bytes.
        threads: of a CTA.
        shared: bytes of shared memory.
        grid: CTAs along both axes.
    """
    copies = [np.ascontiguousarray(array).copy() for array in arrays]
    tensors = {f"array {i}": torch.from_numpy(array.reshape(-1).view(np.uint8)) for i, array in enumerate(copies)}
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 snippet_{i}" for i in range(len(copies)))
    addresses = "\n".join(f"ld.param.b64 %rd{i}, [snippet_{i}];" for i in range(len(copies)))
    text = HEAD.format(parameters=parameters, threads=threads, addresses=addresses, body=body)
    arguments = [tensor.data_ptr() for tensor in tensors.values()]
    Machine(parse(text), shared).launch(grid, arguments, GlobalMemory(tensors))
    return copies


def own(register: int, array: int, size: int) -> str:
    """PTX for %rd{register} = the address of the thread's own element, of `size` bytes, of an array."""
    return f"mad.wide.u32 %rd{register}, %r0, {size}, %rd{array};\n"
