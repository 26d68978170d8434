"""What generation does with caches, end to end on a tiny ANDREA: beams, guesses taken back, shared prompts and prefixes. The
tokens are those that come without, and pages are shared, not copied."""

import itertools

import pytest
import torch

from andrea_triton import ShapeError
from andrea_triton.cache import PagedKVCache
from andrea_triton.nn import Andrea, AndreaConfig, beam_search, generate, speculate
from andrea_triton.nn.readers import CachedReader, Caches, State

TINY = AndreaConfig(vocab_size=40, d_model=32, n_head=4, n_layer=2, context=24)
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 9, 8, 7]]
PAGES = pytest.mark.parametrize("page_size", [None, 4])


def made(config: AndreaConfig, seed: int = 0) -> Andrea:
    torch.manual_seed(seed)
    model = Andrea(config)
    for weight in model.parameters():
        weight.data *= 8.0  # far from uniform, so that rounding does not decide which token is likeliest
    return model


@pytest.fixture(scope="module")
def model() -> Andrea:
    return made(TINY)


def plain_search(model: Andrea, prompt: list[int], steps: int, beams: int, stop: int) -> list[tuple[float, list[int]]]:
    """Beam search as the textbook has it, all computed anew for each token."""
    live, done = [(0.0, prompt)], []
    for _ in range(steps):
        grown = []
        for score, tokens in live:
            with torch.no_grad():
                log_p = model(torch.tensor([tokens]))[0, -1].double().log_softmax(-1)
            grown += [(score + p, [*tokens, token]) for token, p in enumerate(log_p.tolist())]
        grown.sort(key=lambda beam: -beam[0])
        reachable = grown[: 2 * beams]
        done += [beam for beam in reachable if beam[1][-1] == stop]
        live = [beam for beam in reachable if beam[1][-1] != stop][:beams]
    return sorted(done + live, key=lambda beam: -beam[0])[:beams]


@PAGES
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("stop", [5, 17])
def test_beams(model: Andrea, page_size: int | None, beams: int, stop: int) -> None:
    wanted = plain_search(model, PROMPTS[0], 9, beams, stop)
    got = beam_search(model, PROMPTS[0], 9, beams=beams, stop=[stop], page_size=page_size, prefill_chunk=2)
    assert [beam.tokens for beam in got] == [tokens for _, tokens in wanted]
    assert [beam.score for beam in got] == pytest.approx([score for score, _ in wanted], rel=1e-4)
    assert all(beam.tokens == PROMPTS[0] + beam.new for beam in got)


def test_enough_beams_find_the_likeliest_sequence() -> None:
    small = made(AndreaConfig(vocab_size=4, d_model=16, n_head=2, n_layer=1, context=8))
    prompt, scores = [1, 3], {}
    for new in itertools.product(range(4), repeat=3):
        with torch.no_grad():
            log_p = small(torch.tensor([[*prompt, *new]]))[0].double().log_softmax(-1)
        scores[new] = sum(float(log_p[1 + i, token]) for i, token in enumerate(new))
    best = sorted(scores, key=lambda new: -scores[new])
    got = beam_search(small, prompt, 3, beams=64, page_size=2)
    assert [tuple(beam.new) for beam in got[:5]] == best[:5] and len(got) == 64


@PAGES
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_guesses_are_taken_back(model: Andrea, temperature: float, page_size: int | None) -> None:
    """A draft that knows nothing, one that is nearly the model, and the model itself."""
    wanted = generate(model, PROMPTS, 12, temperature=temperature, seed=5, stop=[11])
    steps = max(map(len, wanted.new))
    near = made(TINY)
    for weight in near.parameters():
        weight.data += 0.02 * weight.data.std() * torch.randn(weight.shape)
    passes = {}
    for name, draft in (("other", made(TINY, 1)), ("near", near), ("same", model)):
        got = speculate(model, draft, PROMPTS, 12, ahead=3, temperature=temperature, seed=5, stop=[11], page_size=page_size)
        assert got[:3] == tuple(wanted)
        passes[name] = got.passes
    assert passes["same"] <= passes["near"] <= passes["other"] <= steps
    if temperature == 0.0:
        assert passes["same"] == -(-steps // 4), "every guess of the model itself is right"


def test_guesses_stop_at_the_end_of_the_context(model: Andrea) -> None:
    got = speculate(model, model, PROMPTS, ahead=7, temperature=0.0, page_size=4)
    assert [len(tokens) for tokens in got.tokens] == [24] * 3
    assert got.tokens == generate(model, PROMPTS, temperature=0.0).tokens
    with pytest.raises(ShapeError, match=r"got 0 guesses .* wanted at least 1"):
        speculate(model, model, PROMPTS, ahead=0)


@PAGES
@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_shared_prompts(model: Andrea, samples: int, share_prefix: bool, page_size: int | None) -> None:
    repeated = [prompt for prompt in PROMPTS for _ in range(samples)]
    wanted = generate(model, repeated, 10, seed=2, cached=False)
    settings = {"samples": samples, "share_prefix": share_prefix, "page_size": page_size}
    assert generate(model, PROMPTS, 10, seed=2, **settings) == wanted
    assert generate(model, PROMPTS, 10, seed=2, prefill_chunk=2, **settings) == wanted
    assert generate(model, PROMPTS, 10, seed=2, cached=False, samples=samples) == wanted
    assert len({tuple(new) for new in wanted.new}) == len(wanted.new), "each sample draws its own tokens"


def test_table_of_memory(model: Andrea) -> None:
    """Pages of 4 rows for 4 samples of two prompts that begin with the same 10 tokens, to an end of 20: what each way holds."""
    start = list(range(1, 11))
    prompts, pages = [[*start, 11, 12, 13], [*start, 20, 21, 22]], {}
    for name, caches in {
        "apart": Caches(4),
        "samples": Caches(4, samples=4),
        "samples and prefix": Caches(4, samples=4, share_prefix=True),
    }.items():
        repeated = [prompt[:] for prompt in prompts for _ in range(4)]
        state = State(repeated, [13] * 8, 7, 24, frozenset())
        reader = CachedReader(model, state, caches)
        with torch.inference_mode():
            while state.running:
                state.take(reader.logits().argmax(-1).tolist())
            cache = reader.caches[0]
            assert isinstance(cache, PagedKVCache) and cache.counts == [19] * 8
            pages[name] = (cache.pages, cache.pages - cache.free_pages)
    print("pages made, pages held:", pages)
    # Alone a sequence has 5 pages. Samples share the 3 full ones of the 12 tokens before the last; prompts the 2 of the first 10.
    assert pages == {"apart": (40, 40), "samples": (2 * 3 + 8 * 2,) * 2, "samples and prefix": (2 + 2 * 1 + 8 * 2,) * 2}
