"""Text from a model, token by token: greedy or sampled, for a batch of prompts of different lengths, as a stream or at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .andrea import Andrea
from .readers import CachedReader, Caches, Reader, State, Step, evaluating

Prompt = Sequence[int] | Sequence[Sequence[int]] | Tensor


class Generation(NamedTuple):
    """What `generate` returns.

    Args:
        tokens: for each sequence, its prompt and what came after.
        new: for each sequence, what came after its prompt.
        reasons: for each sequence, why it stopped.
    """

    tokens: list[list[int]]
    new: list[list[int]]
    reasons: list[str]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: the logits are divided by it; 0 takes the largest (greedy).
        top_k: choose among the k likeliest only; None for all.
        top_p: choose among the fewest tokens whose probabilities sum to at least p; None for all.

    Raises:
        ShapeError: a value is out of range.

    Example:
        >>> Sampling(temperature=0.5, top_k=2).probabilities(torch.tensor([1.0, 2.0, 3.0])).tolist()[0]
        0.0
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ShapeError(f"temperature is {self.temperature}; wanted a finite number >= 0; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ShapeError(f"top_k is {self.top_k}; wanted at least 1; None takes all tokens")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ShapeError(f"top_p is {self.top_p}; wanted 0 < top_p <= 1; None takes all tokens")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of the tokens that may be chosen.

        Args:
            logits: (..., vocab).

        Returns:
            (..., vocab) float32, 0 for a token that may not be chosen.

        Source:
            arXiv 1904.09751 (top-p).

        Example:
            >>> Sampling(top_p=0.7).probabilities(torch.tensor([0.5, 0.3, 0.2]).log()).tolist()
            [0.625, 0.375, 0.0]
        """
        logits = logits.float()
        if self.temperature == 0.0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        weights, order = (logits / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            weights[..., self.top_k :] = 0.0
        if self.top_p is not None:
            weights = weights / weights.sum(-1, keepdim=True)
            weights = weights.masked_fill(weights.cumsum(-1) - weights >= self.top_p, 0.0)
        return torch.zeros_like(weights).scatter(-1, order, weights / weights.sum(-1, keepdim=True))

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token by its logits (vocab,), on the CPU."""
        if self.temperature == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), 1, generator=generator))


def generate(
    model: Andrea, prompt: Prompt, max_new_tokens: int | None = None, *, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, seed: int | None = None, stop: Sequence[int] = (), cached: bool = True,
    page_size: int | None = None, prefill_chunk: int | None = None, samples: int = 1, share_prefix: bool = False,
) -> Generation:  # fmt: skip
    """Continue prompts until a stop token, the number asked for, or the end of the context.

    Args:
        model: the model; its mode is put back at the end, and dropout is off meanwhile.
        prompt: tokens of one sequence, or of each sequence of a batch, which may differ in length.
        max_new_tokens: most new tokens of a sequence; None means until the context is full.
        temperature, top_k, top_p: as in `Sampling`; temperature 0 is greedy.
        seed: of the choices; sequence b uses seed + b, so it gives the same alone; None draws one from torch's generator.
        stop: tokens that end a sequence; they are kept.
        cached: keep keys and values; False computes all anew for each token, for comparison.
        page_size: rows of a page for paged caches; None means contiguous ones.
        prefill_chunk: most prompt tokens in one pass; None means all.
        samples: sequences from each prompt, one after the other; with caches it is read once, and its pages are shared.
        share_prefix: with caches, read what all prompts begin with once, and share its pages.

    Returns:
        Generation(tokens, new, reasons). When the context ends before max_new_tokens, a warning says so too.

    Raises:
        ShapeError: an empty prompt, one longer than the context, a token outside the vocabulary, or a setting out of range.
        DTypeError: tokens are no integers.

    Example:
        >>> from andrea_triton.nn.andrea import AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=50, d_model=32, n_head=4, n_layer=2, context=16))
        >>> result = generate(model, [[1, 2, 3], [4]], 5, seed=0)
        >>> [len(tokens) for tokens in result.tokens], result.reasons[0]
        ([8, 6], '5 new tokens were asked for')
    """
    prompts = checked_prompts(prompt, model.config.vocab_size, model.config.context, samples)
    new: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    steps = stream(
        model, prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, cached=cached,
        page_size=page_size, prefill_chunk=prefill_chunk, samples=samples, share_prefix=share_prefix,
    )  # fmt: skip
    with evaluating(model):
        for step in steps:
            reasons = step.reasons
            for tokens, token in zip(new, step.tokens, strict=True):
                tokens.extend([] if token is None else [token])
    full = [b for b, reason in enumerate(reasons) if reason is not None and "context" in reason]
    if full and max_new_tokens is not None:
        warnings.warn(
            f"sequences {full} stopped before {max_new_tokens} new tokens: {reasons[full[0]]}; "
            f"use a shorter prompt or a model with a longer context",
            stacklevel=2,
        )
    whole = [[*old, *tokens] for old, tokens in zip(prompts, new, strict=True)]
    return Generation(whole, new, [str(reason) for reason in reasons])


def stream(
    model: Andrea, prompt: Prompt, max_new_tokens: int | None = None, *, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, seed: int | None = None, stop: Sequence[int] = (), cached: bool = True,
    page_size: int | None = None, prefill_chunk: int | None = None, samples: int = 1, share_prefix: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """`generate` as a stream: one Step per token. Everything is checked before the first.

    Args:
        model, prompt, max_new_tokens, temperature, top_k, top_p, seed, stop, cached, page_size, prefill_chunk, samples,
            share_prefix: as in `generate`.

    Returns:
        An iterator of Step(tokens, reasons). Where no sequence may grow, it brings one Step with the reasons alone.

    Raises:
        ShapeError, DTypeError: as `generate`.

    Example:
        >>> from andrea_triton.nn.andrea import AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=50, d_model=32, n_head=4, n_layer=2, context=16))
        >>> sum(1 for step in stream(model, [1, 2, 3], temperature=0.0))
        13
    """
    sampling = Sampling(temperature, top_k, top_p)
    context = model.config.context
    prompts = checked_prompts(prompt, model.config.vocab_size, context, samples)
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < (name == "prefill_chunk"):
            raise ShapeError(f"{name} is {value}; wanted at least {int(name == 'prefill_chunk')}; None means no limit")
    limit = context if max_new_tokens is None else max_new_tokens
    state = State(prompts, [len(tokens) for tokens in prompts], limit, context, frozenset(stop))
    first = int(torch.randint(2**62, ())) if seed is None else seed
    generators = [torch.Generator().manual_seed(first + b) for b in range(len(prompts))]
    caches = Caches(page_size, prefill_chunk, samples, share_prefix)
    reader = CachedReader(model, state, caches) if cached else Reader(model, state)
    return _steps(model, state, reader, sampling, generators)


def _steps(model: Andrea, state: State, reader: Reader, sampling: Sampling, generators: list[torch.Generator]) -> Iterator[Step]:
    """The steps of a stream."""
    if not state.running:
        yield Step([None] * len(state.tokens), list(state.reasons))
    while state.running:
        with evaluating(model), torch.inference_mode():
            logits = reader.logits().cpu()
        yield state.take([sampling.choose(row, g) for row, g in zip(logits, generators, strict=True)])


def checked_prompts(prompt: Prompt, vocab_size: int, context: int, samples: int = 1) -> list[list[int]]:
    """The tokens of each sequence; those of one prompt follow one another.

    Raises:
        ShapeError: no or empty prompts, prompts longer than the context, tokens outside the vocabulary, no samples.
        DTypeError: tokens are no integers.
    """
    entries: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    nested = bool(entries) and all(isinstance(entry, (list, tuple, Tensor)) for entry in entries)
    rows = entries if nested else [entries]
    prompts = [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]
    for index, tokens in enumerate(prompts):
        if not tokens:
            raise ShapeError(f"prompt {index} is empty; wanted at least one token; begin with a newline's token, say")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise DTypeError(f"prompt {index} holds a {type(token).__name__}; wanted integers; encode the text first")
            if not 0 <= token < vocab_size:
                raise ShapeError(
                    f"prompt {index} holds token {token}; wanted 0 to {vocab_size - 1}; use the model's own tokenizer"
                )
        if len(tokens) > context:
            raise ShapeError(f"prompt {index} has {len(tokens)} tokens; the context is {context}; keep its last {context}")
    if samples < 1:
        raise ShapeError(f"samples is {samples}; wanted at least 1")
    return [tokens[:] for tokens in prompts for _ in range(samples)]
