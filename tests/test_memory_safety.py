"""No access past the ends of a tensor: every input and output lies between pages that end the process when they are touched.

Each case runs in a process of its own. That the check can fail is shown by kernels with a bug.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from andrea_triton import KVCache, attention, decode_attention, varlen_attention
from andrea_triton.testing import Case, Inputs, attend_reference, cast, make_inputs, run
from tests.memory_guard import Edge, Fenced

CASES = {
    case.name: case
    for case in (
        Case("ragged", HQ=4, HKV=2, M=33, N=45, D=24, DV=40, causal=True),
        Case("window and terms", HQ=2, M=45, N=33, D=17, window=(9, 4), softcap=2.0, alibi=True, sinks=True, dropout_p=0.2),
        Case("bias and mask", B=2, HQ=2, M=17, N=33, D=16, bias=(2, 1, 17, 33), hidden=0.3, key_lengths=(0, 33)),
        Case("packed", HQ=2, lengths_q=(17, 0, 5), lengths_k=(33, 5, 7), D=8, causal=True),
        Case("before the first key", HQ=2, M=64, N=33, D=16, window=(9, 4), q_start=-40),
        Case("one of each", HQ=1, M=1, D=1),
    )
}


class Broken(NamedTuple):
    """A text of a kernel's function replaced by another, and the case and edge that show it."""

    module: str
    function: str
    old: str
    new: str
    case: str = "ragged"
    edge: Edge = "end"


BROKEN = {
    "tail mask of loads": Broken("views", "load_tile", "mask=live, other=0.0", "mask=None"),
    "tail mask of stores": Broken("views", "store_tile", "mask=tile_live(row, end, ROWS, COLS, D, True)", "mask=None"),
    "tail mask off by one": Broken("views", "tile_live", "t < end - row", "t <= end - row"),
    "row mask of lse": Broken("forward", "forward", "lse, mask=live)", "lse)"),
    "mask of dbias": Broken("term_grads", "dbias", "acc, mask=live)", "acc)", "bias and mask"),
    "tail mask of decoded queries": Broken(
        "decode", "decode", "mask=live[:, None] & (d < attention.D), other=0.0", "mask=None", "cache"
    ),
    "tail mask of combined rows": Broken("decode", "combine", "mask=live[:, None] & (d < attention.DV))", "mask=None)", "cache"),
    "clamp of bias positions": Broken("scores", "read_matrix", "tl.minimum(k_pos, seq.N - 1)", "k_pos", "bias and mask"),
    "first key before 0": Broken("bands", "round_down", "tl.maximum(x, 0)", "x", "before the first key", "start"),
}


def fenced(inputs: Inputs, fence: Fenced) -> Inputs:
    """The same call with every tensor between forbidden pages."""
    extras = {name: fence.copy(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.extras.items()}
    q, k, v, dout = (fence.copy(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    return inputs._replace(q=q, k=k, v=v, dout=dout, dlse=fence.copy(inputs.dlse), extras=extras)


def call(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    function: Any = varlen_attention if "cu_seqlens_q" in inputs.extras else attention
    out, lse = function(inputs.q, inputs.k, inputs.v, **inputs.settings, **inputs.extras, return_lse=True, backend="interpreter")
    return out, lse


def break_kernel(broken: Broken) -> None:
    """Put the bug into the kernels of this process."""
    from andrea_triton.launch import interpreter

    module = importlib.import_module(f"andrea_triton.kernels.{broken.module}")
    function = getattr(module, broken.function)
    assert broken.old in function.src
    space = dict(vars(module))
    exec(compile(function.src.replace(broken.old, broken.new), "broken", "exec"), space)
    interpreter._python[function.fn] = space[broken.function]


def forward_and_backward(name: str, edge: Edge, dtype: torch.dtype) -> None:
    """Run a case between forbidden pages, and compare it with the reference, so that it is known to have run."""
    fence, inputs = Fenced(edge), make_inputs(CASES[name], dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("andrea_triton.launch.run.allocate", lambda shape, dtype, device, *_: fence.empty(tuple(shape), dtype))
        got = run(fenced(inputs, fence), call)
    exact = run(cast(inputs, torch.float64), attend_reference)
    for found, wanted in zip(got, exact, strict=True):
        if found is not None and wanted is not None:
            torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05)


def decoding(edge: Edge, dtype: torch.dtype) -> None:
    """A cache that is full to its last row, of which the kernels read every one."""
    fence = Fenced(edge)
    cache, k = KVCache(2, 2, 37, 24, dtype=dtype), torch.randn(2, 2, 37, 24).to(dtype)
    cache.append(k, k)
    cache._k, cache._v = fence.copy(cache.k), fence.copy(cache.v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("andrea_triton.launch.run.allocate", lambda shape, dtype, device, *_: fence.empty(tuple(shape), dtype))
        q = fence.copy(torch.randn(2, 4, 3, 24).to(dtype))
        got = decode_attention(q, cache, split_size=16, backend="interpreter")
    wanted = decode_attention(q, cache, backend="reference")
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


def work(bug: str, names: list[str], edge: Edge, dtypes: list[torch.dtype]) -> None:
    """What a child process does."""
    if bug:
        break_kernel(BROKEN[bug])
    for dtype in dtypes:
        for name in names:
            if name == "cache":
                decoding(edge, dtype)
            else:
                forward_and_backward(name, edge, dtype)


@pytest.fixture(scope="module")
def child() -> Callable[..., int | None]:
    """child(*arguments of work): exit status of a process of its own; minus the signal that ended it. The processes are forked
    from one that has imported this file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def start(*arguments: Any) -> int | None:
        process = context.Process(target=work, args=arguments)
        process.start()
        process.join(300)
        return process.exitcode

    return start


@pytest.mark.parametrize("edge", [pytest.param("start", marks=pytest.mark.slow), "end"])
def test_nothing_past_the_ends_is_touched(child: Callable[..., int | None], edge: str) -> None:
    # Before the start nothing depends on the size of an element; past the end it does.
    dtypes = [torch.float16] if edge == "start" else [torch.float16, torch.float32]
    assert child("", [*CASES, "cache"], edge, dtypes) == 0


@pytest.mark.parametrize("bug", BROKEN)
def test_a_kernel_that_goes_past_the_end_dies(child: Callable[..., int | None], bug: str) -> None:
    assert child(bug, [BROKEN[bug].case], BROKEN[bug].edge, [torch.float32]) == -signal.SIGSEGV
