"""Beam search: the likeliest continuations of a prompt, kept side by side in one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .andrea import Andrea
from .generate import Prompt, checked_prompts
from .readers import CachedReader, Caches, State, evaluating


class Beam(NamedTuple):
    """One continuation.

    Args:
        tokens: the prompt and what came after.
        new: what came after.
        score: the sum of the logarithms of the new tokens' probabilities.
    """

    tokens: list[int]
    new: list[int]
    score: float


def beam_search(
    model: Andrea, prompt: Prompt, max_new_tokens: int, *, beams: int = 4, stop: Sequence[int] = (),
    page_size: int | None = None, prefill_chunk: int | None = None,
) -> list[Beam]:  # fmt: skip
    """The likeliest continuations that a search with so many beams finds. The prompt is read once, beams share its pages, and a
    page is copied only when beams that share it go on differently.

    Args:
        model: the model; its mode is put back at the end, and dropout is off meanwhile.
        prompt: tokens of one sequence.
        max_new_tokens: most new tokens; fewer where the context ends.
        beams: continuations kept at each token.
        stop: tokens that end a continuation; they are kept.
        page_size, prefill_chunk: as in `generate`.

    Returns:
        Up to `beams` continuations, the likeliest first.

    Raises:
        ShapeError, DTypeError: as `generate`; more prompts than one, or no beams.

    Source:
        arXiv 1211.3711, section 5 (beam search over a model of sequences).

    Example:
        >>> from andrea_triton.nn.andrea import AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=50, d_model=32, n_head=4, n_layer=2, context=16))
        >>> [len(beam.new) for beam in beam_search(model, [1, 2, 3], 5, beams=2)]
        [5, 5]
    """
    context = model.config.context
    prompts = checked_prompts(prompt, model.config.vocab_size, context)
    if len(prompts) != 1 or beams < 1 or max_new_tokens < 0:
        got = f"{len(prompts)} prompts, {beams} beams and {max_new_tokens} new tokens"
        raise ShapeError(f"got {got}; wanted one prompt, at least 1 beam and 0 tokens; call it once for each prompt")
    start, ends = len(prompts[0]), frozenset(stop)
    state = State(prompts * beams, [start] * beams, max_new_tokens, context, ends)
    reader = CachedReader(model, state, Caches(page_size, prefill_chunk, samples=beams))
    live, done = [Beam(prompts[0], [], 0.0)], list[Beam]()
    with evaluating(model), torch.inference_mode():
        for _ in range(min(max_new_tokens, context - start)):
            live, ended, parents = _step(live, _log_probabilities(reader, live), beams, ends)
            done = _best(done + ended, beams)
            if not live or (len(done) == beams and done[-1].score >= live[0].score):
                return done  # what is live only grows less likely
            for cache in reader.caches:
                cache.reorder([*parents, *[0] * (beams - len(parents))])
    return _best(done + live, beams)


def _log_probabilities(reader: CachedReader, live: list[Beam]) -> Tensor:
    """(live, vocab) of each beam's next token; the sequences behind the live ones bring nothing."""
    if not reader.caches:
        reader.begin()
    sequences = [beam.tokens for beam in live]
    sequences += [[]] * (reader.caches[0].batch - len(live))
    return reader.read(sequences)[: len(live), -1].double().log_softmax(-1).cpu()


def _step(live: list[Beam], log_p: Tensor, beams: int, stop: frozenset[int]) -> tuple[list[Beam], list[Beam], list[int]]:
    """The beams after one token more: those that live, those that ended, and the parents of the former."""
    totals = (log_p + torch.tensor([beam.score for beam in live], dtype=torch.float64)[:, None]).flatten()
    most = min(len(totals), beams * (1 + len(stop)))  # so that enough live where each beam may end in every way
    scores, places = totals.topk(most)
    grown, ended, parents = list[Beam](), list[Beam](), list[int]()
    for score, place in zip(scores.tolist(), places.tolist(), strict=True):
        parent, token = divmod(place, log_p.shape[1])
        old = live[parent]
        beam = Beam([*old.tokens, token], [*old.new, token], score)
        if token in stop:
            ended.append(beam)
        elif len(grown) < beams:
            grown.append(beam)
            parents.append(parent)
    return grown, ended, parents


def _best(beams: list[Beam], number: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score)[:number]
