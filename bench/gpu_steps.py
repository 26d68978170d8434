"""What single steps of the GPU script do: judge a case, time a small call with and without a CUDA graph, train."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from andrea_triton import attention, testing, varlen_attention
from andrea_triton.nn import Andrea, AndreaConfig
from bench.cases import Case, Inputs, text_tokens
from bench.measure import one_call
from bench.providers import Provider
from bench.runner import in_one_line

WARM_CALLS = 3
CALLS = 20
ROUNDS = 7
TRAINING_STEPS = 8


def attend_with(backend: str) -> testing.Attend:
    """The public function, dense or packed, with a named backend."""

    def attend(inputs: testing.Inputs) -> tuple[Tensor, Tensor]:
        settings = {**inputs.settings, **inputs.extras, "return_lse": True, "backend": backend}
        function: Any = varlen_attention if "max_q" in settings else attention
        out, lse = function(inputs.q, inputs.k, inputs.v, **settings)
        return out, lse

    return attend


def wall_seconds(call: Callable[[], None], device: str) -> float:
    """Median time of a call, from before Python makes it to after the device is done with CALLS of them."""
    samples = []
    for _ in range(WARM_CALLS):
        call()
    for _ in range(ROUNDS):
        wait(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait(device)
        samples.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(samples)


def wait(device: str) -> None:
    """Until the device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def latency(case: Case, provider: Provider, inputs: Inputs) -> dict[str, Any]:
    """Seconds of a forward call, eager and replayed from a CUDA graph, and why there is none of either."""
    found: dict[str, Any] = {"eager_s": None, "graph_s": None, "samples": ROUNDS, "reason": None}
    try:
        with provider.context():
            call = one_call(provider.make(case), inputs, "forward")
            found["eager_s"] = wall_seconds(call, case.device)
            if case.device == "cuda":
                found["graph_s"] = wall_seconds(captured(call), case.device)
            else:
                found["reason"] = "a CPU has no CUDA graphs"
    except Exception as error:
        found["reason"] = in_one_line(error)
    return found


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The call as a CUDA graph, after warming up beside the main stream as capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def training(backend: str, device: str, smoke: bool, deadline: float) -> dict[str, Any]:
    """Tokens per second of whole training steps: forward, loss, backward, AdamW; bf16 autocast on a GPU.

    Args:
        backend: of the attention; "naive" holds T×T.
        device: where.
        smoke: a model of a few thousand weights in place of ANDREA-120M.
        deadline: reading of time.monotonic() after which no further step is begun, once two are timed.

    Returns:
        A line of results: the model, the batch, samples in seconds, tokens per second and peak memory (0 on a CPU).
    """
    torch.manual_seed(0)
    name = "smoke" if smoke else "andrea-120m"
    tiny = AndreaConfig(vocab_size=256, d_model=32, n_head=2, n_layer=2, context=32)
    model = (Andrea(tiny, backend=backend) if smoke else Andrea.preset(name, backend=backend)).to(device)
    batch, length = (2, 32) if smoke else (16, 1024)
    tokens = text_tokens(batch, length + 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples: list[float] = []
    for turn in range(2 + TRAINING_STEPS):
        if len(samples) >= 2 and time.monotonic() > deadline:
            break
        wait(device)
        begin = time.perf_counter()
        step()
        wait(device)
        if turn >= 2:
            samples.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    speed = batch * length / statistics.median(samples)
    line = {"model": name, "backend": backend, "batch": batch, "length": length, "samples": samples}
    return {**line, "tokens_per_second": speed, "peak_bytes": peak}
