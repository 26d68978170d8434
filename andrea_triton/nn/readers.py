"""Sequences while they grow, and the logits of their next tokens: all computed anew, or from caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import Cache
from .andrea import Andrea


class Step(NamedTuple):
    """What one step of a stream brings.

    Args:
        tokens: the new token of each sequence, None where the sequence has stopped.
        reasons: why a sequence stopped, None while it runs.
    """

    tokens: list[int | None]
    reasons: list[str | None]


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

    def take(self, chosen: Sequence[int | None]) -> Step:
        """Append a token to each sequence that still grows; None leaves it as it is."""
        new: list[int | None] = [None] * len(self.tokens)
        for sequence, token in enumerate(chosen):
            if self.reasons[sequence] is None and token is not None:
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


class Caches(NamedTuple):
    """How keys and values are kept.

    Args:
        page_size: rows of a page for paged caches; None means contiguous ones.
        chunk: most prompt tokens in one pass; None means all.
        samples: sequences of each prompt, which is read once.
        share_prefix: read once what all prompts begin with.
    """

    page_size: int | None = None
    chunk: int | None = None
    samples: int = 1
    share_prefix: bool = False


class CachedReader(Reader):
    """Logits of each sequence's next token, from caches: the prompts at first, then the newest tokens alone.

    Args:
        model: the model.
        state: the sequences; where there are samples, those of one prompt follow one another.
        caches: how to keep keys and values.
    """

    def __init__(self, model: Andrea, state: State, caches: Caches) -> None:
        super().__init__(model, state)
        self.settings, samples = caches, caches.samples
        self.prompts = [tokens[:] for tokens in state.tokens[::samples]]
        self.prefix = _common(self.prompts) if caches.share_prefix else 0
        self.ends = [min(start + state.limit, state.context) for start in state.starts]
        self.caches: list[Cache] = []

    def logits(self) -> Tensor:
        """(B, vocab). Sequences end at the right edge; what is in front of the shorter ones is padding."""
        if not self.caches:
            self.begin()
        grown = [tokens if reason is None else [] for tokens, reason in zip(self.state.tokens, self.state.reasons, strict=True)]
        return self.read(grown)[:, -1]

    def begin(self) -> None:
        """Make the caches, and read once what sequences share: the prefix of all prompts, the prompt of samples."""
        prompts, samples = self.prompts, self.settings.samples
        page_size = self.settings.page_size
        pages = None if page_size is None else self._pages(page_size)
        first = 1 if self.prefix else len(prompts)
        self.caches = self.model.new_caches(first, max(self.ends), page_size=page_size, pages=pages)
        if self.prefix:
            self.read([prompts[0][: self.prefix]])
            self.fork([0] * len(prompts))
        if samples > 1:
            self.read([prompt[:-1] for prompt in prompts])
            self.fork([b for b in range(len(prompts)) for _ in range(samples)])

    def fork(self, sequences: list[int]) -> None:
        """Go on with these sequences, one of them as often as wanted."""
        self.caches = [cache.fork(sequences) for cache in self.caches]

    def read(self, sequences: list[list[int]], keep: int = 1) -> Tensor:
        """Bring what the caches do not hold yet of each sequence through the model.

        Args:
            sequences: tokens of each, those that are held included; one with no more than that stays as it is.
            keep: of how many of the last tokens logits are wanted.

        Returns:
            (B, keep, vocab), empty where there was nothing new.
        """
        fresh = [tokens[count:] for tokens, count in zip(sequences, self.caches[0].counts, strict=True)]
        width = max(map(len, fresh))
        padded = torch.tensor([[0] * (width - len(new)) + new for new in fresh], device=self.device)
        for cache in self.caches:
            cache.reserve([count + len(new) for count, new in zip(cache.counts, fresh, strict=True)])  # a compiled model cannot
        logits, step = [torch.empty(0, 0, 0)], self.settings.chunk or width
        for start in range(0, width, max(step, 1)):
            end = min(start + step, width)
            rows = [min(max(end - (width - len(new)), 0), end - start) for new in fresh]
            whole = all(row == end - start for row in rows)
            known = None if whole else torch.tensor(rows)  # on the host, and as numbers that a compiled model is not made for
            logits.append(self.model(padded[:, start:end], caches=self.caches, rows=known, last=keep == 1))
        return logits[-1] if keep == 1 else torch.cat(logits[1:], 1)[:, -keep:]

    def _pages(self, page_size: int) -> int:
        """Pages that the sequences need at their ends, what is shared counted once."""
        samples, total = self.settings.samples, self.prefix // page_size
        for prompt, end in zip(self.prompts, self.ends[::samples], strict=True):
            shared = (len(prompt) - 1 if samples > 1 else self.prefix) // page_size
            total += shared - self.prefix // page_size + samples * (-(-end // page_size) - shared)
        return total


def _common(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with, the last of each left out; 0 for one prompt."""
    first, shortest = prompts[0], min(map(len, prompts)) - 1
    alike = [all(prompt[at] == first[at] for prompt in prompts) for at in range(shortest)]
    return 0 if len(prompts) == 1 else [*alike, False].index(False)
