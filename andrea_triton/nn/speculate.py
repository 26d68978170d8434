"""Speculative decoding: a small model guesses ahead, the large one checks all guesses in one pass, the caches forget the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .andrea import Andrea
from .generate import Prompt, Sampling, checked_prompts
from .readers import CachedReader, Caches, State, evaluating


class Speculation(NamedTuple):
    """What `speculate` returns.

    Args:
        tokens, new, reasons: as in `Generation`.
        passes: how often the large model ran after the prompts.
    """

    tokens: list[list[int]]
    new: list[list[int]]
    reasons: list[str]
    passes: int


def speculate(
    model: Andrea, draft: Andrea, prompt: Prompt, max_new_tokens: int | None = None, *, ahead: int = 4, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int | None = None, stop: Sequence[int] = (),
    page_size: int | None = None,
) -> Speculation:  # fmt: skip
    """Continue prompts as `generate` does, in fewer passes of the model where the draft guesses well.

    Every token is chosen from the model's own logits by the sequence's own generator, and a guess counts where it is that token:
    so the tokens are those of `generate` with the same seed, up to rounding of the logits.

    Args:
        model: the model; its mode, and the draft's, are put back at the end, and dropout is off meanwhile.
        draft: a cheaper model of the same vocabulary, whose context is at least as long.
        prompt, max_new_tokens, temperature, top_k, top_p, seed, stop, page_size: as in `generate`.
        ahead: guesses for each pass.

    Returns:
        Speculation(tokens, new, reasons, passes).

    Raises:
        ShapeError, DTypeError: as `generate`; no guesses, or a draft that does not fit.

    Source:
        arXiv 2211.17192 (speculative decoding).

    Example:
        >>> from andrea_triton.nn.andrea import AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=50, d_model=32, n_head=4, n_layer=2, context=16))
        >>> speculate(model, model, [1, 2, 3], 10, ahead=4, temperature=0.0).passes
        2
    """
    context, vocab_size = model.config.context, model.config.vocab_size
    if draft.config.vocab_size != vocab_size or draft.config.context < context or ahead < 1:
        got = f"{ahead} guesses of a draft with {draft.config.vocab_size} tokens and a context of {draft.config.context}"
        raise ShapeError(f"got {got}; wanted at least 1, {vocab_size} tokens as the model has, and {context} or more")
    prompts = checked_prompts(prompt, vocab_size, context)
    limit = context if max_new_tokens is None else max_new_tokens
    starts = [len(tokens) for tokens in prompts]
    state = State(prompts, starts, limit, context, frozenset(stop))
    first = int(torch.randint(2**62, ())) if seed is None else seed
    generators = [torch.Generator().manual_seed(first + b) for b in range(len(prompts))]
    sampling, passes = Sampling(temperature, top_k, top_p), 0
    room = State([tokens[:] for tokens in prompts], [max(starts)] * len(prompts), limit, context, frozenset())  # alike for all
    readers = [CachedReader(one, room, Caches(page_size)) for one in (model, draft)]
    with evaluating(model), evaluating(draft), torch.inference_mode():
        for reader in readers:
            reader.begin()
            reader.read([tokens[:-1] for tokens in prompts])
        while state.running:
            _round(state, readers, ahead, sampling, generators)
            passes += 1
    new = [tokens[start:] for tokens, start in zip(state.tokens, starts, strict=True)]
    return Speculation(state.tokens, new, [str(reason) for reason in state.reasons], passes)


def _round(state: State, readers: list[CachedReader], ahead: int, sampling: Sampling, generators: list[torch.Generator]) -> None:
    """Guess, check, take what is right and one token more, and forget the rest."""
    running = [reason is None for reason in state.reasons]
    longest = max(len(tokens) for tokens, runs in zip(state.tokens, running, strict=True) if runs)
    guesses = min(ahead, readers[0].caches[0].capacity - longest)
    guessed = [tokens[:] if runs else [] for tokens, runs in zip(state.tokens, running, strict=True)]
    for _ in range(guesses):
        for tokens, token in zip(guessed, readers[1].read(guessed)[:, -1].argmax(-1).tolist(), strict=True):
            tokens.extend([token] if tokens else [])
    logits = readers[0].read(guessed, keep=guesses + 1).cpu()
    for sequence, tokens in enumerate(guessed):
        if tokens:
            _take(state, sequence, tokens, logits[sequence], sampling, generators[sequence])
    for reader in readers:
        for cache in reader.caches:
            cache.crop([len(tokens) - 1 for tokens in state.tokens])


def _take(
    state: State, sequence: int, guessed: list[int], logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> None:
    """Choose tokens from the model's logits (guesses + 1, vocab) as long as the guesses before them were right."""
    for row in logits:
        at = len(state.tokens[sequence])
        chosen = sampling.choose(row, generator)
        state.take([chosen if other == sequence else None for other in range(len(state.tokens))])
        if state.reasons[sequence] is not None or at >= len(guessed) or guessed[at] != chosen:
            return
