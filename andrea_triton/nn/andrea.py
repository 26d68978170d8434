"""The ANDREA family: decoder-only transformers over this library's attention.

    x = token embedding + learned position
    x = x + attention(norm(x));  x = x + mlp(norm(x))     in each block
    logits = head(norm(x))

No biases, an RMSNorm without parameters, mlp = 4 · d_model with GELU, and a head that shares nothing with the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..cache import Cache, KVCache, PagedKVCache, Rows
from ..errors import DTypeError, ShapeError
from ..spec import Window, make_spec
from .attention import CausalSelfAttention, head_dim, next_positions
from .parallel import kv_heads_here, split_of
from .weights import load_tensors, save_tensors

NORM_EPS = 1e-6
INIT_STD = 0.02


@dataclass(frozen=True)
class AndreaConfig:
    """What a model is made from.

    Args:
        vocab_size: number of tokens.
        d_model: width.
        n_head: query heads; they divide d_model.
        n_layer: blocks.
        context: most tokens of a sequence.
        n_kv_head: key and value heads; None means n_head.
        norm: "rms" (no parameters), or "layer" for LayerNorm with a learned scale.
        positions: "learned", or "rotary" in the attention.
        dropout: of attention weights and of what a block adds, in training mode only.
        window: keys that a token sees, as in `attention`.
        softcap: as in `attention`.

    Raises:
        ShapeError: a size or setting is wrong, such as heads that do not divide d_model.
        DTypeError: a setting has the wrong type.

    Example:
        >>> PRESETS["andrea-120m"].n_parameters
        98698752
    """

    vocab_size: int
    d_model: int = 768
    n_head: int = 12
    n_layer: int = 12
    context: int = 1024
    n_kv_head: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["learned", "rotary"] = "learned"
    dropout: float = 0.0
    window: Window = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "context"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise DTypeError(f"{name} is a {type(size).__name__}; wanted an int; pass int({name})")
            if size < 1:
                raise ShapeError(f"{name} is {size}; wanted at least 1; give the model some")
        if self.norm not in ("rms", "layer"):
            raise ShapeError(f"norm is {self.norm!r}; wanted 'rms' or 'layer'; leave it out for 'rms'")
        if self.positions not in ("learned", "rotary"):
            raise ShapeError(f"positions is {self.positions!r}; wanted 'learned' or 'rotary'; leave it out for 'learned'")
        if self.head_dim % 2 and self.positions == "rotary":
            raise ShapeError(f"head dim is {self.head_dim}; rotary wants an even one; change d_model or n_head")
        make_spec(causal=True, window=self.window, softcap=self.softcap, dropout_p=self.dropout)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_dim(self) -> int:
        """Features per head."""
        return head_dim(self.d_model, self.n_head, self.kv_heads)

    @property
    def n_parameters(self) -> int:
        """Numbers that the model learns."""
        d, kv = self.d_model, self.kv_heads * self.head_dim
        block = 2 * d * d + 2 * d * kv + 8 * d * d
        norms = (2 * self.n_layer + 1) * d if self.norm == "layer" else 0
        rows = self.context if self.positions == "learned" else 0
        return (2 * self.vocab_size + rows) * d + self.n_layer * block + norms


PRESETS = {
    "andrea-12m": AndreaConfig(vocab_size=2305, d_model=384, n_head=12, n_layer=6),
    "andrea-120m": AndreaConfig(vocab_size=8449, d_model=768, n_head=12, n_layer=12),
    "andrea-480m": AndreaConfig(vocab_size=8449, d_model=1536, n_head=24, n_layer=16),
}


class RMSNorm(nn.Module):
    """x over the root of its mean square, without parameters (arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) in, (..., d) out."""
        return nn.functional.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def make_norm(config: AndreaConfig) -> nn.Module:
    """The norm that a config names."""
    return RMSNorm() if config.norm == "rms" else nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: AndreaConfig, backend: str | None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention = CausalSelfAttention(
            config.d_model, config.n_head, config.n_kv_head, dropout=config.dropout, window=config.window,
            softcap=config.softcap, rotary=config.positions == "rotary", backend=backend,
        )  # fmt: skip
        self.widen = nn.Linear(config.d_model, 4 * config.d_model, bias=False)
        self.narrow = nn.Linear(4 * config.d_model, config.d_model, bias=False)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x: Tensor, cache: Cache | None, rows: Rows | None) -> Tensor:
        """(B, T, d_model) in, (B, T, d_model) out."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache=cache, rows=rows))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.widen(self.mlp_norm(x)))))


class Andrea(nn.Module):
    """A language model of the family.

    Args:
        config: its sizes.
        backend: of the attention, as in `attention`, or "naive" for the textbook's M×N matrix, to compare with.

    Example:
        >>> model = Andrea(AndreaConfig(vocab_size=50, d_model=32, n_head=4, n_layer=2, context=16))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 50])
    """

    def __init__(self, config: AndreaConfig, *, backend: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, *, backend: str | None = None) -> Andrea:
        """A model of a named size, its weights drawn from torch's generator.

        Args:
            name: andrea-12m, andrea-120m or andrea-480m.
            backend: of the attention.

        Returns:
            The model.

        Raises:
            ShapeError: there is no such preset.
        """
        if name not in PRESETS:
            raise ShapeError(f"preset is {name!r}; wanted one of {', '.join(PRESETS)}; or pass an AndreaConfig to Andrea")
        return cls(PRESETS[name], backend=backend)

    def reset_parameters(self) -> None:
        """Draw all weights: normal, what ends a residual branch smaller by sqrt(2 · n_layer)."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                ends = name.endswith(("W_O.weight", "narrow.weight"))
                nn.init.normal_(weight, std=INIT_STD / (2 * self.config.n_layer) ** 0.5 if ends else INIT_STD)

    def forward(
        self,
        tokens: Tensor,
        *,
        caches: Sequence[Cache] | None = None,
        rows: Rows | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits of the token after each token.

        Args:
            tokens: (B, T) integers; with caches, those that come after what the caches hold.
            caches: one per block, from `new_caches`; the tokens are appended to them.
            rows: with caches, how many of the last tokens of each sequence are real; None means all T.
            last: logits of the last token only.

        Returns:
            (B, T, vocab_size), or (B, 1, vocab_size).

        Raises:
            ShapeError: too many tokens, a token outside the vocabulary (read on the CPU only), or caches that do not fit.
            DTypeError: tokens are no integers.
        """
        self._check_tokens(tokens, caches, rows)
        x = self.tokens(tokens)
        if self.positions is not None:
            T = tokens.shape[1]
            at = torch.arange(T, device=tokens.device) if caches is None else next_positions(caches[0], T, rows)
            x = x + self.positions(at)
        x = self.dropout(x)
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index], rows)
        return self.head(self.norm(x[:, -1:] if last else x))

    def new_caches(
        self, batch: int, capacity: int | None = None, *, page_size: int | None = None, pages: int | None = None
    ) -> list[Cache]:
        """Empty caches for a batch, one per block, on the model's device and in its dtype; under tensor parallelism for this
        rank's heads.

        Args:
            batch: sequences.
            capacity: most tokens of a sequence; None means the context.
            page_size: rows of a page for paged caches; None means contiguous ones.
            pages: pages of each paged cache; None means enough for the batch at full capacity. Forks share them.

        Returns:
            The caches.

        Raises:
            ShapeError: a size is wrong.
        """
        c, weight = self.config, self.head.weight
        first = self.blocks[0]
        assert isinstance(first, Block)
        kv_heads = kv_heads_here(c.kv_heads, split_of(first.attention.W_O))
        sizes = (batch, kv_heads, c.context if capacity is None else capacity, c.head_dim)
        if page_size is None:
            return [KVCache(*sizes, dtype=weight.dtype, device=weight.device) for _ in self.blocks]
        dtype, device = weight.dtype, weight.device
        return [PagedKVCache(*sizes, page_size=page_size, pages=pages, dtype=dtype, device=device) for _ in self.blocks]

    def save(self, path: Path | str) -> None:
        """Write config and weights to a safetensors file, whole or not at all. A model that is split over ranks is saved by all
        of them together, and written by the first.

        Args:
            path: the file.

        Raises:
            UnsupportedError: safetensors is not installed.
        """
        save_tensors(path, self.state_dict(), {"andrea": json.dumps(asdict(self.config))})

    @classmethod
    def load(cls, path: Path | str, *, backend: str | None = None) -> Andrea:
        """Read a model that `save` wrote. Nothing in the file is run.

        Args:
            path: the file.
            backend: of the attention.

        Returns:
            The model, on the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            ShapeError: the file is corrupt, holds no such model, or its weights do not fit its config.
        """
        tensors, notes = load_tensors(path)
        config = read_config(notes.get("andrea"), path)
        with torch.random.fork_rng(devices=[]):  # its weights are drawn, and then replaced
            model = cls(config, backend=backend)
        model.take_weights(tensors, path)
        return model

    def take_weights(self, tensors: dict[str, Tensor], path: Path | str) -> None:
        """Make tensors the model's weights.

        Args:
            tensors: by the names of the state dict; they are taken, not copied.
            path: where they came from, for the message.

        Raises:
            ShapeError: a name or shape does not fit; the weights stay as they were.
        """
        own = self.state_dict()
        wrong = sorted(name for name in own.keys() | tensors.keys() if not _same_kind(own.get(name), tensors.get(name)))
        if wrong:
            name = wrong[0]
            got, wanted = (None if t is None else tuple(t.shape) for t in (tensors.get(name), own.get(name)))
            raise ShapeError(
                f"{path} does not fit the model: {len(wrong)} tensors differ, first {name}: got {got}, wanted {wanted}; "
                f"load it with the config that it was saved with"
            )
        self.load_state_dict(tensors, assign=True)

    def _check_tokens(self, tokens: Tensor, caches: Sequence[Cache] | None, rows: Rows | None) -> None:
        if tokens.dtype not in (torch.int32, torch.int64):
            raise DTypeError(f"tokens are {tokens.dtype}; wanted int64 or int32; cast them with .long()")
        if tokens.dim() != 2:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}; wanted (batch, T); use tokens[None]")
        ends = [tokens.shape[1]]
        if caches is not None:
            if len(caches) != len(self.blocks) or caches[0].batch != tokens.shape[0]:
                raise ShapeError(f"caches do not fit {len(self.blocks)} blocks and {tokens.shape[0]} sequences; use new_caches")
            if torch.compiler.is_compiling():
                return  # the lengths are the device's: to ask the host would compile anew for each token
            new = [tokens.shape[1]] * caches[0].batch if rows is None else [int(row) for row in rows]
            ends = [count + row for count, row in zip(caches[0].counts, new, strict=False)]
        if max(ends) > self.config.context:
            raise ShapeError(f"a sequence has {max(ends)} tokens; the context is {self.config.context}; shorten it")
        if not torch.compiler.is_compiling() and tokens.is_cpu and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                wanted = f"wanted 0 to {self.config.vocab_size - 1}; use the tokenizer that the model was trained with"
                raise ShapeError(f"tokens go from {low} to {high}; {wanted}")


def _same_kind(own: Tensor | None, other: Tensor | None) -> bool:
    return own is not None and other is not None and own.shape == other.shape and other.is_floating_point()


def read_config(text: str | None, path: Path | str) -> AndreaConfig:
    """The config in a file's notes.

    Raises:
        ShapeError: there is none, or it is no config.
    """
    try:
        entries = json.loads(text or "")
        unknown = entries.keys() - {field.name for field in fields(AndreaConfig)}
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}")
        if isinstance(entries.get("window"), list):
            entries["window"] = tuple(entries["window"])
        return AndreaConfig(**entries)
    except (ValueError, TypeError, AttributeError) as error:
        raise ShapeError(f"{path} holds no ANDREA config ({error}); wanted a file that Andrea.save wrote") from error
