"""backends.partial_backward: the gradients over parts of the keys, from out and lse over all of them, add up to the whole."""

from dataclasses import replace

import pytest
import torch

from andrea_triton import backends, ops, testing
from andrea_triton.functional import merge_attention
from andrea_triton.problem import make_problem
from andrea_triton.spec import make_spec
from andrea_triton.testing import Case

CASES = [
    Case("plain", HQ=2, HKV=1, M=9, N=22, D=16, causal=True),
    Case("exact scores", HQ=2, M=9, N=22, D=16, causal=True, softcap=2.0),
    Case("DV, empty rows", M=9, N=22, D=16, DV=8, causal=True, q_start=-4),
    Case("negative scale, window", M=9, N=22, D=16, window=(7, 2), scale=-0.4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_add_up(case: Case, dtype: torch.dtype, backend: str, device: str) -> None:
    """Keys in two parts of unequal length, of which a query may see none in one."""
    inputs = testing.make_inputs(case, dtype, device)._replace(dlse=None)
    exact = testing.run(testing.cast(inputs, torch.float64), testing.attend_reference)
    eager = testing.run(inputs, testing.attend_reference)
    spec, acc = make_spec(**inputs.settings), torch.float32
    first = inputs.k.shape[2] - inputs.q.shape[2] if case.q_start is None else case.q_start

    parts = []
    for keys in (slice(0, 13), slice(13, None)):
        q, k, v = inputs.q, inputs.k[:, :, keys], inputs.v[:, :, keys]
        problem = make_problem(q, k, v, replace(spec, q_start=first - keys.start))
        parts.append((problem, q, k, v))
    with torch.no_grad():
        (out_a, lse_a), (out_b, lse_b) = (ops.attend(*part, None, None, backend) for part in parts)
    out, lse = merge_attention(out_a.to(acc), lse_a, out_b.to(acc), lse_b)
    out = out.to(dtype)

    a, b = (backends.partial_backward(*part, out, lse, inputs.dout, backend) for part in parts)
    grads = {"dq": (a[0].to(acc) + b[0].to(acc)).to(dtype), "dk": torch.cat([a[1], b[1]], 2), "dv": torch.cat([a[2], b[2]], 2)}
    for name, got in grads.items():
        testing.assert_accurate(got, getattr(eager, name), getattr(exact, name), dtype, f"{case.name}, {backend}: {name}")
