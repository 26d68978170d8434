"""Text from a model, token by token: greedy or sampled, for a batch of prompts of different lengths, as a stream or at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from .andrea import Andrea

Prompt = Sequence[int] | Sequence[Sequence[int]] | Tensor


class Step(NamedTuple):
    """What one step of a stream brings.

    Args:
        tokens: the new token of each sequence, None where the sequence has stopped.
        reasons: why a sequence stopped, None while it runs.
    """

    tokens: list[int | None]
    reasons: list[str | None]


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


@dataclass
class State:
    """The sequences of a batch while they grow.

    Args:
        tokens: of each sequence, the prompt's first.
        starts: lengths of the prompts.
        limit: most new tokens of a sequence.
        context: most tokens of a sequence.
        stop: tokens that end a sequence.
    """

    tokens: list[list[int]]
    starts: list[int]
    limit: int
    context: int
    stop: frozenset[int]
    reasons: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reasons = [self._reason(sequence) for sequence in range(len(self.tokens))]

    @property
    def running(self) -> bool:
        """Whether any sequence still grows."""
        return None in self.reasons

    def take(self, chosen: Sequence[int]) -> Step:
        """Append a token to each sequence that still grows."""
        new: list[int | None] = [None] * len(self.tokens)
        for sequence, token in enumerate(chosen):
            if self.reasons[sequence] is None:
                new[sequence] = token
                self.tokens[sequence].append(token)
                self.reasons[sequence] = self._reason(sequence)
        return Step(new, list(self.reasons))

    def _reason(self, sequence: int) -> str | None:
        length, start = len(self.tokens[sequence]), self.starts[sequence]
        if length > start and self.tokens[sequence][-1] in self.stop:
            return f"token {self.tokens[sequence][-1]} ends a sequence"
        if length - start >= self.limit:
            return f"{self.limit} new tokens were asked for"
        if length >= self.context:
            return f"the context of {self.context} tokens is full"
        return None


def generate(
    model: Andrea, prompt: Prompt, max_new_tokens: int | None = None, *, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, seed: int | None = None, stop: Sequence[int] = (), cached: bool = True,
    page_size: int | None = None, prefill_chunk: int | None = None,
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
    prompts = checked_prompts(prompt, model.config.vocab_size, model.config.context)
    new: list[list[int]] = [[] for _ in prompts]
    reasons: list[str | None] = [None] * len(prompts)
    steps = stream(
        model, prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, cached=cached,
        page_size=page_size, prefill_chunk=prefill_chunk,
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
    page_size: int | None = None, prefill_chunk: int | None = None,
) -> Iterator[Step]:  # fmt: skip
    """`generate` as a stream: one Step per token. Everything is checked before the first.

    Args:
        model, prompt, max_new_tokens, temperature, top_k, top_p, seed, stop, cached, page_size, prefill_chunk: as in `generate`.

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
    prompts = checked_prompts(prompt, model.config.vocab_size, context)
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value is not None and value < (name == "prefill_chunk"):
            raise ShapeError(f"{name} is {value}; wanted at least {int(name == 'prefill_chunk')}; None means no limit")
    limit = context if max_new_tokens is None else max_new_tokens
    state = State(prompts, [len(tokens) for tokens in prompts], limit, context, frozenset(stop))
    first = int(torch.randint(2**62, ())) if seed is None else seed
    generators = [torch.Generator().manual_seed(first + b) for b in range(len(prompts))]
    reader = CachedReader(model, state, page_size, prefill_chunk) if cached else Reader(model, state)
    return _steps(model, state, reader, sampling, generators)


@contextmanager
def evaluating(model: Andrea) -> Iterator[None]:
    """Dropout off while it lasts; the model's mode is put back. Going through the modules costs as much as a block, so a caller
    of many steps does it once around them."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def _steps(model: Andrea, state: State, reader: Reader, sampling: Sampling, generators: list[torch.Generator]) -> Iterator[Step]:
    """The steps of a stream."""
    if not state.running:
        yield Step([None] * len(state.tokens), list(state.reasons))
    while state.running:
        with evaluating(model), torch.inference_mode():
            logits = reader.logits().cpu()
        yield state.take([sampling.choose(row, g) for row, g in zip(logits, generators, strict=True)])


class Reader:
    """Logits of each sequence's next token, all computed anew."""

    def __init__(self, model: Andrea, state: State) -> None:
        self.model, self.state = model, state
        self.device = model.head.weight.device

    def logits(self) -> Tensor:
        """(B, vocab). Causal attention lets the padding behind a sequence change nothing."""
        lengths = [len(tokens) for tokens in self.state.tokens]
        padded = [tokens + [0] * (max(lengths) - len(tokens)) for tokens in self.state.tokens]
        logits = self.model(torch.tensor(padded, device=self.device))
        return logits[torch.arange(len(lengths)), torch.tensor(lengths) - 1]


class CachedReader(Reader):
    """Logits of each sequence's next token, from caches: the prompts at first, then the newest tokens alone."""

    def __init__(self, model: Andrea, state: State, page_size: int | None, chunk: int | None) -> None:
        super().__init__(model, state)
        most = max(min(start + state.limit, state.context) for start in state.starts)
        self.caches = model.new_caches(len(state.tokens), most, page_size=page_size)
        self.chunk = chunk

    def logits(self) -> Tensor:
        """(B, vocab). Sequences end at the right edge; what is in front of the shorter ones is padding."""
        held = self.caches[0].counts
        fresh = [
            tokens[count:] if reason is None else []
            for tokens, count, reason in zip(self.state.tokens, held, self.state.reasons, strict=True)
        ]
        width = max(map(len, fresh))
        padded = torch.tensor([[0] * (width - len(new)) + new for new in fresh], device=self.device)
        logits = torch.empty(0)
        for cache in self.caches:
            cache.reserve([len(tokens) for tokens in self.state.tokens])  # a compiled model cannot
        step = self.chunk or width
        for start in range(0, width, step):
            end = min(start + step, width)
            rows = [min(max(end - (width - len(new)), 0), end - start) for new in fresh]
            whole = all(row == end - start for row in rows)
            known = None if whole else torch.tensor(rows)  # on the host, and as numbers that a compiled model is not made for
            logits = self.model(padded[:, start:end], caches=self.caches, rows=known, last=True)
        return logits[:, -1]


def checked_prompts(prompt: Prompt, vocab_size: int, context: int) -> list[list[int]]:
    """The tokens of each sequence.

    Raises:
        ShapeError: no or empty prompts, prompts longer than the context, tokens outside the vocabulary.
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
    return prompts
