"""Generation: with and without a cache, alone and in a batch, what ends it, and how the next token is chosen."""

import time

import pytest
import torch

from andrea_triton import DTypeError, ShapeError
from andrea_triton.nn import Andrea, AndreaConfig, Sampling, generate, stream

TINY = AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]


@pytest.fixture
def model() -> Andrea:
    model = Andrea(TINY)
    for weight in model.parameters():
        weight.data *= 8.0  # far from uniform, so that rounding does not decide which token is likeliest
    return model


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cache_changes_nothing(model: Andrea, temperature: float, page_size: int | None) -> None:
    plain = generate(model, PROMPTS, 12, temperature=temperature, seed=5, cached=False)
    cached = generate(model, PROMPTS, 12, temperature=temperature, seed=5, page_size=page_size)
    chunked = generate(model, PROMPTS, 12, temperature=temperature, seed=5, page_size=page_size, prefill_chunk=2)
    assert plain == cached == chunked
    assert [len(tokens) for tokens in plain.new] == [12] * 3
    assert all(whole[: len(prompt)] == prompt for whole, prompt in zip(plain.tokens, PROMPTS, strict=True))


def test_sequence_is_the_same_alone_and_in_a_batch(model: Andrea) -> None:
    together = generate(model, PROMPTS, 10, seed=3)
    for b, prompt in enumerate(PROMPTS):
        assert generate(model, prompt, 10, seed=3 + b).new[0] == together.new[b]


def test_seeds(model: Andrea) -> None:
    first, again, other = (generate(model, [1], 15, seed=s).new for s in (1, 1, 2))
    assert first == again != other
    torch.manual_seed(9)
    drawn = generate(model, [1], 15).new
    torch.manual_seed(9)
    assert generate(model, [1], 15).new == drawn
    greedy = generate(model, [1], 15, temperature=0.0).new
    assert greedy == generate(model, [1], 15, top_k=1).new == generate(model, [1], 15, top_p=1e-6).new


def test_prompt_may_be_a_tensor(model: Andrea) -> None:
    wanted = generate(model, [[1, 2], [3, 4]], 3, seed=0)
    assert generate(model, torch.tensor([[1, 2], [3, 4]]), 3, seed=0) == wanted
    assert generate(model, torch.tensor([1, 2]), 3, seed=0).new[0] == wanted.new[0]


@pytest.mark.parametrize("cached", [True, False])
def test_stops_at_the_end_of_the_context(model: Andrea, cached: bool) -> None:
    result = generate(model, PROMPTS, seed=1, cached=cached)
    assert [len(tokens) for tokens in result.tokens] == [24] * 3
    assert set(result.reasons) == {"the context of 24 tokens is full"}
    message = r"sequences \[0\] stopped before 20 new tokens: the context of 24 tokens is full; use a shorter prompt"
    with pytest.warns(UserWarning, match=message):
        result = generate(model, PROMPTS, 20, seed=1, cached=cached)
    assert [len(tokens) for tokens in result.new] == [19, 20, 20]
    full = generate(model, [list(range(24))], cached=cached)
    assert full.new == [[]] and full.reasons == ["the context of 24 tokens is full"]


def test_stops_at_a_token(model: Andrea) -> None:
    free = generate(model, PROMPTS, 12, temperature=0.0)
    stop = free.new[0][4]
    result = generate(model, PROMPTS, 12, temperature=0.0, stop=[stop])
    for tokens, all_tokens, reason in zip(result.new, free.new, result.reasons, strict=True):
        end = all_tokens.index(stop) + 1 if stop in all_tokens else 12
        assert tokens == all_tokens[:end]
        assert reason == (f"token {stop} ends a sequence" if stop in all_tokens else "12 new tokens were asked for")


def test_stream_brings_each_token(model: Andrea) -> None:
    whole = generate(model, PROMPTS, 6, seed=2)
    steps = list(stream(model, PROMPTS, 6, seed=2))
    assert [[step.tokens[b] for step in steps] for b in range(3)] == whole.new
    assert [step.reasons for step in steps[:-1]] == [[None] * 3] * 5 and steps[-1].reasons == whole.reasons
    assert [step.tokens for step in stream(model, [1], 0)] == [[None]]
    begun = stream(model, [1], 6, seed=2)
    assert next(begun).tokens[0] == generate(model, [1], 1, seed=2).new[0][0]


def test_mode_is_put_back_and_dropout_is_off() -> None:
    model = Andrea(AndreaConfig(40, 32, 4, 2, 24, dropout=0.5))
    assert generate(model, [1], 8, seed=0) == generate(model, [1], 8, seed=0)
    assert model.training
    model.eval()
    generate(model, [1], 2)
    assert not model.training


def test_probabilities() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for sampling, wanted in (
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (Sampling(temperature=0.0), [0, 1, 0, 0]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(top_p=1.0), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
    ):
        torch.testing.assert_close(sampling.probabilities(logits), torch.tensor(wanted, dtype=torch.float32))
    batch = torch.randn(3, 5, 11)
    each = torch.stack([torch.stack([Sampling(0.7, 4, 0.8).probabilities(row) for row in rows]) for rows in batch])
    torch.testing.assert_close(Sampling(0.7, 4, 0.8).probabilities(batch), each)


def test_choices_follow_the_probabilities() -> None:
    logits, generator = torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), torch.Generator().manual_seed(0)
    counts = torch.tensor([Sampling().choose(logits, generator) for _ in range(4000)]).bincount(minlength=4) / 4000
    assert (counts - logits.exp()).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_bad_input_is_named(model: Andrea) -> None:
    for prompt, error, message in (
        ([], ShapeError, "prompt 0 is empty"),
        ([[1], []], ShapeError, "prompt 1 is empty"),
        ([1] * 25, ShapeError, "prompt 0 has 25 tokens; the context is 24; keep its last 24"),
        ([[1], [2, 40]], ShapeError, "prompt 1 holds token 40; wanted 0 to 39"),
        ([-1], ShapeError, "holds token -1"),
        ([1.5], DTypeError, "holds a float; wanted integers"),
        (["a"], DTypeError, "holds a str"),
    ):
        with pytest.raises(error, match=message):
            stream(model, prompt)
    for name, value in (("temperature", -1.0), ("temperature", float("nan")), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.1)):
        with pytest.raises(ShapeError, match=f"{name} is {value}"):
            stream(model, [1], **{name: value})
    with pytest.raises(ShapeError, match="max_new_tokens is -1"):
        stream(model, [1], -1)
    with pytest.raises(ShapeError, match="prefill_chunk is 0"):
        stream(model, [1], prefill_chunk=0)


@pytest.mark.slow
def test_cache_makes_512_tokens_10_times_faster() -> None:
    """One run of both on this machine, the same tokens, three sequences at once. One sequence alone has little more to do for a
    token than to read the weights: there, on two slow cores, the factor is 8."""
    model, prompts, seconds, tokens = Andrea.preset("andrea-12m"), [[1], [2], [3]], {}, {}
    generate(model, prompts, 4, temperature=0.0)
    for cached in (True, False):
        start = time.perf_counter()
        tokens[cached] = generate(model, prompts, 511, temperature=0.0, cached=cached).tokens
        seconds[cached] = time.perf_counter() - start
    print({cached: f"{taken:.1f} s" for cached, taken in seconds.items()})
    assert tokens[True] == tokens[False]
    assert seconds[False] >= 10 * seconds[True], seconds
