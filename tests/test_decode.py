"""decode_attention on every backend: any number of rows, pages of any size, any strides, under torch.compile and vmap."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_triton import KVCache, PagedKVCache, ShapeError, UnsupportedError, decode_attention
from andrea_triton.cache import Cache
from andrea_triton.nn import Andrea, AndreaConfig, generate
from andrea_triton.testing import Inputs, assert_accurate, attend_reference, cast
from tests.backends import here

F32 = torch.float32


def filled(lengths: list[int], kv_heads: int, page: int | None, dtype: torch.dtype = F32, D: int = 8, DV: int = 8) -> Cache:
    """A cache of sequences of these lengths, with room for one row more."""
    batch, most = len(lengths), max(lengths)
    settings: dict[str, Any] = {"v_head_dim": DV, "dtype": dtype, "device": here()}
    if page is None:
        cache: Cache = KVCache(batch, kv_heads, most + 1, D, **settings)
    else:
        cache = PagedKVCache(batch, kv_heads, most + 1, D, page_size=page, **settings)
    k, v = torch.randn(batch, kv_heads, most, D).to(dtype), torch.randn(batch, kv_heads, most, DV).to(dtype)
    cache.append(k, v, lengths)
    return cache


def judge(got: tuple[Tensor, Tensor], q: Tensor, cache: Cache, settings: dict[str, Any], terms: dict[str, Any]) -> None:
    """Each sequence by the accuracy rule."""
    k, v = cache.keys_values(max(cache.counts))
    for b, n in enumerate(cache.counts):
        own = slice(b, b + 1)
        one = Inputs(q[own], k[own, :, :n], v[own, :, :n], q, None, {"causal": True, **settings}, terms)
        eager, exact = attend_reference(one), attend_reference(cast(one, torch.float64))
        if q.dtype == torch.float64:  # 2**26 times closer than fp32 has to be, as the rule has it
            narrow = cast(one, torch.float32)
            pairs = zip(exact, attend_reference(narrow), attend_reference(cast(narrow, torch.float64)), strict=True)
            eager = tuple(x + (fp32 - best) * 2.0**-26 for x, fp32, best in pairs)
        assert_accurate(got[0][own], eager[0], exact[0], q.dtype, f"out of sequence {b}")
        assert_accurate(got[1][own], eager[1], exact[1], got[1].dtype, f"lse of sequence {b}")


@pytest.mark.parametrize(
    ("HQ", "HKV", "M", "page"), [(32, 1, 5, None), (4, 2, 3, 8), (4, 1, 40, 5), (2, 2, 1, 1), (17, 1, 8, 24)], ids=str
)
def test_any_rows_and_pages(backend: str, HQ: int, HKV: int, M: int, page: int | None) -> None:
    """Over 128 rows to a key head, and pages that no tile fits in; sequences of no key, fewer keys than queries, and more."""
    cache, q = filled([45, 0, 3], HKV, page, D=20, DV=12), torch.randn(3, HQ, M, 20)
    terms = {"sinks": torch.randn(2 * HQ)[::2], "alibi": torch.rand(HQ, 3)[:, 1]}
    for settings, extras in (({}, {}), ({"window": 4, "softcap": 3.0}, terms)):
        got = decode_attention(q, cache, **settings, **extras, split_size=16, return_lse=True, backend=backend)
        judge(got, q, cache, settings, extras)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    cache, q = filled([19, 2], 1, 6, dtype), torch.randn(2, 3, 2, 8).to(dtype)
    judge(decode_attention(q, cache, window=5, return_lse=True, backend=backend), q, cache, {"window": 5}, {})
    for empty in (q[:, :, :0], q[:, :0]):
        out, lse = decode_attention(empty, cache, return_lse=True, backend=backend) if empty.shape[1] else (empty, q.new_empty(0))
        assert out.shape == empty.shape
        assert dtype != torch.float64 or lse.dtype == torch.float64


def test_prefill_in_chunks(backend: str) -> None:
    """Many new tokens onto many cached ones are what the whole is."""
    cache, q = filled([150, 90], 1, 16), torch.randn(2, 2, 70, 8)
    judge(decode_attention(q, cache, split_size=512, return_lse=True, backend=backend), q, cache, {}, {})


def test_strides_of_lengths_tables_and_terms(backend: str) -> None:
    """Columns of larger tables, expanded and reversed ones, are read as contiguous copies are."""
    cache, q = filled([20, 7], 2, 16), torch.randn(2, 4, 1, 8)
    assert isinstance(cache, PagedKVCache)
    terms = {"sinks": torch.randn(4, 3)[:, 1], "alibi": torch.rand(4, 2).T}
    wanted = decode_attention(q, cache, **{n: t.contiguous() for n, t in terms.items()}, backend=backend)
    cache.lengths = torch.stack([cache.lengths, cache.lengths + 5], 1)[:, 0]
    cache.page_table = torch.stack([cache.page_table.long(), cache.page_table.long() - 9], 2)[..., 0]
    cache.k_pages = cache.k_pages.mT.contiguous().mT
    assert torch.equal(decode_attention(q, cache, **terms, backend=backend), wanted)
    flat = q.mT.contiguous().mT.expand(2, 4, 1, 8)
    assert torch.equal(decode_attention(flat, cache, **terms, backend=backend), wanted)


def test_lengths_and_pages_outside_of_the_cache_are_refused(backend: str) -> None:
    q = torch.randn(2, 2, 1, 8)
    for page in (None, 4):
        for length in (-1, 99):
            cache = filled([5, 3], 2, page)
            cache.lengths[1] = length
            with pytest.raises(ShapeError, match=rf"\[1\] is {length}; wanted 0 to"):
                decode_attention(q, cache, backend=backend)
    for number in (-1, 99):
        cache = filled([5, 3], 2, 4)
        assert isinstance(cache, PagedKVCache)
        cache.page_table[1, 1] = number  # of no row that is there
        decode_attention(q, cache, backend=backend)
        cache.page_table[0, 1] = number
        with pytest.raises(ShapeError, match=rf"page {number} for rows 4 .. of sequence 0; wanted 0 to"):
            decode_attention(q, cache, backend=backend)


def test_pages_shared_between_sequences_and_a_deep_copy(backend: str) -> None:
    cache, q = filled([9, 9], 1, 4), torch.randn(1, 2, 1, 8).expand(2, -1, -1, -1)
    assert isinstance(cache, PagedKVCache)
    cache.page_table[1] = cache.page_table[0]
    out = decode_attention(q, cache, backend=backend)
    assert torch.equal(out[0], out[1])
    other = copy.deepcopy(cache)
    other.append(torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8))
    assert cache.counts == [9, 9] and other.counts == [10, 10]
    assert torch.equal(decode_attention(q, cache, backend=backend), out)


def test_gradients_are_refused() -> None:
    cache, q, sinks = filled([3], 1, None), torch.randn(1, 1, 1, 8), torch.zeros(1, requires_grad=True)
    for one, term in ((q.clone().requires_grad_(), None), (q, sinks)):
        with pytest.raises(UnsupportedError, match="a cache holds no graph"):
            decode_attention(one, cache, sinks=term)
    with torch.no_grad():
        assert not decode_attention(q, cache, sinks=sinks).requires_grad


def test_vmap_and_operator(backend: str) -> None:
    if backend == "reference":
        pytest.skip("the operator takes any backend alike")
    cache, q, alibi = filled([9, 4], 1, 4), torch.randn(3, 2, 2, 1, 8), torch.rand(3, 2)

    def call(q: Tensor, alibi: Tensor) -> Tensor:
        out = decode_attention(q, cache, alibi=alibi, sinks=torch.ones(2), softcap=2.0, window=6, backend=backend)
        assert isinstance(out, Tensor)
        return out

    wanted = torch.stack([call(*pair) for pair in zip(q, alibi, strict=True)])
    assert torch.equal(torch.vmap(call)(q, alibi), wanted)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q[0], alibi[0]), wanted[0])


@pytest.mark.parametrize("page", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_compiled_step_compiles_once(backend: str, page: int | None) -> None:
    """Lengths grow on the device; the host's numbers are read when they are asked for."""
    if backend == "reference":
        pytest.skip("the operator takes any backend alike")
    torch._dynamo.reset()
    model = Andrea(AndreaConfig(vocab_size=20, d_model=16, n_head=2, n_layer=1, context=16)).eval()
    for block in model.blocks:
        block.attention.backend = backend
    compiles = []

    def counting(graph: Any, _: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    compiled, tokens = torch.compile(model, backend=counting, fullgraph=True), torch.randint(0, 20, (2, 5))
    with torch.no_grad():
        eager, traced = (model.new_caches(2, 7, page_size=page) for _ in range(2))
        traced[0].reserve([7, 7])
        for t in range(5):
            wanted, got = model(tokens[:, t : t + 1], caches=eager), compiled(tokens[:, t : t + 1], caches=traced)
            assert torch.equal(got, wanted)
        assert len(compiles) == 1 and traced[0].counts == eager[0].counts == [5, 5]
        traced[0].append(torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 1, 8), [1, 0])
        compiled(tokens[:, :1], caches=traced)
        assert traced[0].counts == traced[0].lengths.tolist() == [7, 6]
        with pytest.raises(ShapeError, match="would have 8 rows; the cache holds 7"):
            compiled(tokens[:, :1], caches=traced)
    if page is not None:
        with torch.no_grad(), pytest.raises(ShapeError, match=r"call cache.reserve"):
            compiled(tokens[:, :1], caches=model.new_caches(2, 7, page_size=page))


def test_generation_by_a_compiled_model() -> None:
    torch._dynamo.reset()
    model = Andrea(AndreaConfig(vocab_size=20, d_model=16, n_head=2, n_layer=1, context=16))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    prompts = [[1, 2, 3], [4]]
    assert generate(compiled, prompts, 8, seed=0, page_size=4) == generate(model, prompts, 8, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("page", [None, 16])
def test_one_compile_for_200_tokens(page: int | None) -> None:
    """As a program is built of it, inductor and all: each cache, tokens equal those of the eager run."""
    torch._dynamo.reset()
    model = Andrea(AndreaConfig(vocab_size=64, d_model=32, n_head=4, n_layer=2, context=208)).eval()
    for weight in model.parameters():
        weight.data *= 6.0  # far from uniform, so that rounding does not decide which token is likeliest
    compiles = []

    def counting(graph: Any, inputs: list[Tensor]) -> Any:
        compiles.append(graph)
        return torch._inductor.compile(graph, inputs)

    compiled: Any = torch.compile(model, backend=counting, fullgraph=True)
    tokens = {}
    with torch.inference_mode():
        prompts = torch.tensor([[1], [2]])
        for name, step in (("eager", model), ("compiled", compiled)):
            caches, token, seen = model.new_caches(2, page_size=page), prompts, []
            for cache in caches:
                cache.reserve([200, 200])
            for _ in range(200):
                token = step(token, caches=caches, last=True)[:, -1].argmax(-1, keepdim=True)
                seen.append(token)
            assert caches[0].counts == [200, 200]
            tokens[name] = torch.cat(seen, 1)
    assert len(compiles) == 1 and len(tokens["eager"].unique()) > 8
    assert torch.equal(tokens["compiled"], tokens["eager"])


@pytest.mark.parametrize("page", [None, 3])
def test_inference_mode_on_either_side(page: int | None) -> None:
    rows, q = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 1, 8)
    with torch.inference_mode():
        inside = copy.deepcopy(filled([4], 1, page))
    inside.append(rows[:, :, :1], rows[:, :, :1])
    outside = filled([4], 1, page)
    with torch.inference_mode():
        outside.append(rows[:, :, :1].clone(), rows[:, :, :1])
        assert decode_attention(q, outside).isfinite().all()
    assert decode_attention(q, inside).isfinite().all()
    inside.reset()
    assert inside.counts == inside.lengths.tolist() == [0]


def test_rows_as_a_tensor(recwarn: pytest.WarningsRecorder) -> None:
    cache, k = KVCache(2, 1, 4, 8), torch.randn(2, 1, 3, 8)
    cache.append(k, k, torch.tensor([3, 1]))
    assert cache.counts == [3, 1] and all(type(count) is int for count in cache.counts)
    assert not recwarn
    with pytest.raises(ShapeError, match="wanted 2 numbers from 0 to 3"):
        cache.append(k, k, torch.tensor([4, 0]))
