"""The reference against loops by hand and against gradcheck; dropout, packed sequences, the user's functions."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton.dropout import dropout_mask, philox
from andrea_triton.errors import UnsupportedError
from andrea_triton.problem import Problem, make_problem
from andrea_triton.reference import reference, statistics, weights
from andrea_triton.spec import Mask, Score, make_spec

INF = float("inf")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def fixed(*shape: int) -> Tensor:
    """Random numbers that are the same in every run, for what is drawn before a test starts."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def split(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of a call, as those of make_spec and those of make_problem."""
    names = ("causal", "window", "q_start", "scale", "softcap", "dropout_p")
    settings = {name: value for name, value in keywords.items() if name in names}
    return settings, {name: value for name, value in keywords.items() if name not in names}


def problem_of(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Problem:
    settings, extras = split(keywords)
    return make_problem(q, k, v, make_spec(**settings), **extras)


def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    return reference(problem_of(q, k, v, **keywords), q, k, v)


def logit_by_hand(p: Problem, q: Tensor, k: Tensor, b: int, h: int, i: int, j: int) -> float | None:
    """One logit in Python floats, None where query i may not see key j."""
    x, q_pos = p.extras, p.q_start + i
    if p.spec.left is not None and j < q_pos - p.spec.left:
        return None
    if p.spec.right is not None and j > q_pos + p.spec.right:
        return None
    if x.key_lengths is not None and j >= x.key_lengths[b]:
        return None
    if x.keep is not None and not x.keep[b, h, i, j]:
        return None
    kv = h // (p.HQ // p.HKV)
    s = p.scale * sum(float(q[b, h, i, d]) * float(k[b, kv, j, d]) for d in range(p.D))
    if p.spec.softcap is not None:
        s = p.spec.softcap * math.tanh(s / p.spec.softcap)
    if x.slopes is not None:
        s -= float(x.slopes[b, h]) * abs(q_pos - j)
    if x.bias is not None:
        s += float(x.bias[b, h, i, j])
    return s


def row_by_hand(p: Problem, q: Tensor, k: Tensor, b: int, h: int, i: int) -> tuple[list[float], float]:
    """(weights, lse) of one query in Python floats."""
    row = [logit_by_hand(p, q, k, b, h, i, j) for j in range(p.N)]
    terms = [s for s in row if s is not None] + ([] if p.extras.sinks is None else [float(p.extras.sinks[h])])
    if not terms:
        return [0.0] * p.N, -INF
    lse = max(terms) + math.log(sum(math.exp(s - max(terms)) for s in terms))
    return [0.0 if s is None else math.exp(s - lse) for s in row], lse


def by_hand(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, weights) by loops."""
    out, lse, matrix = randn(p.B, p.HQ, p.M, p.DV), randn(p.B, p.HQ, p.M), randn(p.B, p.HQ, p.M, p.N)
    for b, h, i in itertools.product(range(p.B), range(p.HQ), range(p.M)):
        row, lse[b, h, i] = row_by_hand(p, q, k, b, h, i)
        for d in range(p.DV):
            out[b, h, i, d] = sum(w * float(v[b, h // p.group, j, d]) for j, w in enumerate(row))
        matrix[b, h, i] = torch.tensor(row, dtype=torch.float64)
    return out, lse, matrix


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, top-left": {"causal": True, "q_start": 0},
    "causal, q_start -2": {"causal": True, "q_start": -2},
    "window": {"window": 2},
    "causal window": {"causal": True, "window": 2},
    "left and right": {"window": (1, 0)},
    "negative scale": {"scale": -0.35},
    "zero scale": {"scale": 0.0, "causal": True},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": fixed(2, 1, 3, 5), "scale": 0.3},
    "mask": {"mask": torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()},
    "ALiBi": {"alibi": torch.tensor([[0.5, 0.25, 1.0, 2.0], [1.5, 0.125, 0.0, -1.0]])},
    "sinks": {"sinks": fixed(4)},
    "sinks on empty rows": {"sinks": fixed(4), "causal": True, "q_start": -2},
    "key lengths": {"key_lengths": torch.tensor([2, 0])},
    "all": {
        "causal": True,
        "window": 3,
        "q_start": 1,
        "scale": 0.8,
        "softcap": 1.5,
        "bias": fixed(4, 3, 5),
        "mask": fixed(2, 1, 3, 5) > -0.8,
        "alibi": torch.tensor([0.5, 0.25, 1.0, 2.0]),
        "sinks": fixed(4),
        "key_lengths": torch.tensor([4, 5]),
    },
}


def small() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of 2 batch entries, 4 heads on 2, 3 queries, 5 keys, D 2, DV 3."""
    return randn(2, 4, 3, 2), randn(2, 2, 5, 2), randn(2, 2, 5, 3)


@pytest.mark.parametrize("keywords", FEATURES.values(), ids=FEATURES.keys())
def test_equals_loops_by_hand(keywords: dict[str, Any]) -> None:
    q, k, v = small()
    p = problem_of(q, k, v, **keywords)
    out, lse = reference(p, q, k, v)
    wanted_out, wanted_lse, wanted_weights = by_hand(p, q, k, v)
    torch.testing.assert_close(out, wanted_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weights(p, q, k), wanted_weights, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("keywords", FEATURES.values(), ids=FEATURES.keys())
def test_gradcheck(keywords: dict[str, Any]) -> None:
    learned = {name: x for name, x in keywords.items() if name in ("bias", "sinks")}
    inputs = [x.clone().requires_grad_() for x in (*small(), *learned.values())]

    def both(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, **{**keywords, **dict(zip(learned, rest, strict=True))})
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(both, inputs)


@pytest.mark.parametrize("keywords", FEATURES.values(), ids=FEATURES.keys())
def test_statistics_by_hand(keywords: dict[str, Any]) -> None:
    q, k, v = small()
    p = problem_of(q, k, v, **keywords)
    peak, entropy = statistics(p, q, k)
    assert (peak.dtype, entropy.dtype, peak.requires_grad) == (torch.float32, torch.float32, False)
    for b, h, i in itertools.product(range(2), range(4), range(3)):
        logits = [logit_by_hand(p, q, k, b, h, i, j) for j in range(5)]
        row, _ = row_by_hand(p, q, k, b, h, i)
        assert peak[b, h, i].item() == pytest.approx(max([s for s in logits if s is not None], default=-INF), rel=1e-6)
        assert entropy[b, h, i].item() == pytest.approx(-sum(w * math.log(w) for w in row if w), abs=1e-6)


def test_worked_example() -> None:
    q = torch.tensor([[[[math.sqrt(2), 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]]], dtype=torch.float64)
    p = problem_of(q, k, v)
    out, lse = reference(p, q, k, v)
    assert weights(p, q, k).flatten().tolist() == pytest.approx([0.665, 0.090, 0.245], abs=5e-4)
    assert out.flatten().tolist() == pytest.approx([0.788, 0.212], abs=5e-4)
    assert lse.item() == pytest.approx(math.log(math.exp(2) + 1 + math.e))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in small())
    p = problem_of(q, k, v, sinks=randn(4), bias=randn(3, 5))
    out, lse = reference(p, q, k, v)
    assert (out.dtype, out.shape) == (dtype, (2, 4, 3, 3))
    assert (lse.dtype, lse.shape) == (torch.float64 if dtype == torch.float64 else torch.float32, (2, 4, 3))
    assert weights(p, q, k).dtype == dtype


def test_causal_weights_are_a_distribution_with_nothing_above_the_diagonal() -> None:
    q = randn(1, 2, 9, 4)
    matrix = weights(problem_of(q, q, q, causal=True), q, q)
    assert (matrix >= 0).all()
    assert torch.equal(matrix, matrix.tril())
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 2, 9, dtype=torch.float64))


@pytest.mark.parametrize("keywords", [{"causal": True}, {"causal": True, "window": 3}, {"causal": True, "softcap": 2.0}])
def test_a_group_of_heads_equals_repeated_heads(keywords: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in small())
    k4, v4 = (x.detach().repeat_interleave(2, 1).requires_grad_() for x in (k, v))
    grouped, repeated = attend(q, k, v, **keywords), attend(q, k4, v4, **keywords)
    flow = [randn(2, 4, 3, 3), randn(2, 4, 3)]
    got, wanted = torch.autograd.grad(grouped, (k, v), flow), torch.autograd.grad(repeated, (k4, v4), flow)
    for a, b in zip((*grouped, *got), (*repeated, *(x.unflatten(1, (2, 2)).sum(2) for x in wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_window_over_all_keys_is_causal() -> None:
    q, k, v = small()
    for a, b in zip(attend(q, k, v, causal=True), attend(q, k, v, causal=True, window=5), strict=True):
        assert torch.equal(a, b)


def test_permuting_the_batch_permutes_the_result_bitwise() -> None:
    q, k, v = small()
    for a, b in zip(attend(q, k, v), attend(q.flip(0), k.flip(0), v.flip(0)), strict=True):
        assert torch.equal(a.flip(0), b)


def philox_by_hand(first: int, second: int, key: int) -> int:
    """Philox2x32-10 in Python integers."""
    for _ in range(10):
        product = first * 0xD256D193
        first, second = (product >> 32) ^ key ^ second, product % 2**32
        key = (key + 0x9E3779B9) % 2**32
    return first


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ((0, 0, 0), 0xFF1DAE59),
        ((0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), 0x2C3F628B),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E), 0xDD7CE038),
    ],
)
def test_philox_gives_the_published_answers(words: tuple[int, int, int], first: int) -> None:
    assert philox_by_hand(*words) == first
    assert philox(*(torch.tensor(word) for word in words)).item() == first


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 12345, -1])
def test_dropout_mask_by_hand(seed: int) -> None:
    q_pos, k_pos = torch.tensor([-3, 0, 5]), torch.tensor([0, 1, 2**27])
    mask = dropout_mask(seed, 0.3, 2, 3, q_pos, k_pos, "cpu", first_batch=4)
    for b, h, i, j in itertools.product(range(2), range(3), range(3), range(3)):
        key = philox_by_hand((b + 4) * 3 + h, (seed >> 32) % 2**32, seed % 2**32)
        word = philox_by_hand(q_pos[i].item() % 2**32, k_pos[j].item() % 2**32, key)
        assert mask[b, h, i, j].item() == (word >= int(0.3 * 2**32))


def test_dropout_mask_depends_on_positions_alone() -> None:
    positions = torch.arange(96)
    whole = dropout_mask(3, 0.25, 2, 4, positions, positions, "cpu")
    part = dropout_mask(torch.tensor([3]), 0.25, 1, 4, positions[40:], positions[7:9], "cpu", first_batch=1)
    assert torch.equal(whole[1:, :, 40:, 7:9], part)
    assert whole.double().mean().item() == pytest.approx(0.75, abs=0.01)
    assert whole.flatten(1).double().mean(1).std().item() < 0.01
    assert not torch.equal(whole, dropout_mask(4, 0.25, 2, 4, positions, positions, "cpu"))
    assert not torch.equal(whole, dropout_mask(3 + 2**32, 0.25, 2, 4, positions, positions, "cpu"))
    assert dropout_mask(3, 0.0, 1, 1, positions, positions, "cpu").all()


def test_dropout_drops_weights_after_the_softmax_and_scales_the_rest() -> None:
    q, k, v = small()
    keywords = {"causal": True, "sinks": randn(4)}
    matrix = weights(problem_of(q, k, v, **keywords), q, k)
    mask = dropout_mask(9, 0.4, 2, 4, torch.arange(2, 5), torch.arange(5), "cpu")
    out, lse = attend(q, k, v, **keywords, dropout_p=0.4, seed=9)
    torch.testing.assert_close(out, (matrix * mask / 0.6) @ v.repeat_interleave(2, 1))
    assert torch.equal(lse, attend(q, k, v, **keywords)[1])


def test_gradcheck_with_dropout() -> None:
    inputs = [x.requires_grad_() for x in small()]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, dropout_p=0.4, seed=torch.tensor(9)), inputs)


QUERIES, KEYS = (3, 0, 5, 2), (4, 3, 0, 6)
STARTS: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 3, 3, 8, 10]),
    "cu_seqlens_k": torch.tensor([0, 4, 7, 7, 13]),
    "max_q": 5,
    "max_k": 6,
}


def chains(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """A score that depends on every index that it gets."""
    return score + 0.1 * batch - 0.2 * head + 0.3 * (q_pos - k_pos)


PACKED_FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 2, "q_start": 1},
    {"softcap": 1.0, "sinks": fixed(4), "alibi": fixed(4, 4).float()},
    {"causal": True, "dropout_p": 0.3, "seed": 5},
    {"score": Score(None, torch_fn=chains)},
    {"mask": Mask(None, torch_fn=lambda b, h, q_pos, k_pos: (b + h + q_pos + k_pos) % 3 > 0)},
]


@pytest.mark.parametrize("keywords", PACKED_FEATURES)
def test_c22_packed_equals_each_sequence_alone(keywords: dict[str, Any]) -> None:
    q, k, v = randn(16, 4, 2), randn(15, 2, 2), randn(15, 2, 3)
    q[10:], k[13:], v[13:] = float("nan"), float("nan"), float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    p = problem_of(q, k, v, **STARTS, **keywords)
    (out, lse), (peak, entropy) = reference(p, q, k, v), statistics(p, q, k)
    assert (out.shape, lse.shape, peak.shape) == ((16, 4, 3), (4, 16), (4, 16))
    grads = torch.autograd.grad(out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum(), leaves)
    for rows in (out, *grads):
        assert (rows[10 if rows.shape[1] == 4 else 13 :] == 0).all()
    assert (lse[:, 10:] == -INF).all()
    first_q = first_k = 0
    for b, (M, N) in enumerate(zip(QUERIES, KEYS, strict=True)):
        i, j = slice(first_q, first_q + M), slice(first_k, first_k + N)
        first_q, first_k = i.stop, j.stop
        alone = one_of_a_batch(b, q[i], k[j], v[j], keywords)
        for rows, wanted in zip((out[i].transpose(0, 1), lse[:, i], peak[:, i], entropy[:, i]), alone, strict=True):
            torch.testing.assert_close(rows, wanted)


def one_of_a_batch(b: int, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> list[Tensor]:
    """out, lse and statistics of one sequence as entry b of a dense batch of 4 equal ones."""
    q, k, v = (x.transpose(0, 1).expand(4, -1, -1, -1) for x in (q, k, v))
    p = problem_of(q, k, v, **keywords)
    return [rows[b] for rows in (*reference(p, q, k, v), *statistics(p, q, k))]


def test_packed_weights_are_refused() -> None:
    q, k, v = randn(10, 4, 2), randn(13, 2, 2), randn(13, 2, 3)
    with pytest.raises(UnsupportedError, match="attention_weights is not supported by varlen"):
        weights(problem_of(q, k, v, **STARTS), q, k)


def test_user_functions_change_scores_and_masks() -> None:
    q, k, v = small()
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
    keywords = {
        "bias": randn(3, 5),
        "softcap": 1.5,
        "score": Score(None, args=(0.5,), torch_fn=lambda s, b, h, q_pos, k_pos, slope: s - slope * (q_pos - k_pos).abs()),
        "mask": Mask(None, args=(documents,), torch_fn=lambda b, h, q_pos, k_pos, ids: ids[b, q_pos] == ids[b, k_pos]),
    }
    distance = (torch.arange(2, 5)[:, None] - torch.arange(5)).abs()
    same = (documents[:, 2:, None] == documents[:, None, :])[:, None]
    plain = {"softcap": 1.5, "bias": keywords["bias"] - 0.5 * distance, "mask": same}
    for got, wanted in zip(attend(q, k, v, **keywords), attend(q, k, v, **plain), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("keywords", [{"score": Score(None)}, {"mask": Mask(None)}])
def test_a_function_without_its_dense_twin_says_so(keywords: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        attend(*small(), **keywords)
    assert (caught.value.feature, caught.value.backend) == (next(iter(keywords)), "reference")
    assert "torch_fn is missing" in caught.value.reason
