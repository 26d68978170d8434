"""Texts as tokens: bytes or a tokenizer file, the standard library's sources as a corpus, and batches from it."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ShapeError
from .weights import needed

HELD_OUT = 20  # one file in so many is for validation; of a single text, its end
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


class Tokenizer(Protocol):
    """What turns text into tokens and back."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class ByteTokenizer:
    """A token for each byte of the UTF-8 text.

    Example:
        >>> ByteTokenizer().encode("né"), ByteTokenizer().decode([110, 195, 169])
        ([110, 195, 169], 'né')
    """

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Bytes of a text."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of bytes; what is no UTF-8 becomes a replacement sign."""
        return bytes(tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers library.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ShapeError: it is no tokenizer file.
        UnsupportedError: tokenizers is not installed.
    """

    def __init__(self, path: Path | str) -> None:
        library = needed("tokenizers", "a tokenizer file")
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is no file; wanted a tokenizer.json")
        try:
            self._tokenizer: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ShapeError(f"{path} is no tokenizer file ({error}); wanted a tokenizer.json") from error
        self.vocab_size = int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, no special ones added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


@dataclass(frozen=True)
class Corpus:
    """A text to learn and one to be judged by.

    Args:
        name: what it is, for people.
        train: (tokens,) integers.
        validation: (tokens,) integers, of other files or of the text's end.
        bytes_per_token: of the validation text.
        vocab_size: number of tokens that there are.
    """

    name: str
    train: Tensor
    validation: Tensor
    bytes_per_token: float
    vocab_size: int


def read_corpus(text: Path | str | None, tokenizer: Tokenizer, context: int) -> Corpus:
    """A corpus from a text file, or from the standard library's sources.

    Args:
        text: the file, UTF-8; None for the sources.
        tokenizer: what makes its tokens.
        context: most tokens of a sequence; each part must be longer.

    Returns:
        The corpus.

    Raises:
        FileNotFoundError: there is no such file.
        ShapeError: the text is empty or too short.
    """
    if text is None:
        train, validation, name = *library_texts(), "the Python standard library's sources"
    else:
        path = Path(text)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file; wanted a text file")
        whole, name = path.read_text(encoding="utf-8", errors="replace"), str(path)
        if not whole.strip():
            raise ShapeError(f"{path} is empty; wanted a text to learn")
        cut = len(whole) - len(whole) // HELD_OUT
        train, validation = whole[:cut], whole[cut:]
    dtype = torch.uint8 if tokenizer.vocab_size <= 256 else torch.int32
    parts = [torch.tensor(tokenizer.encode(part), dtype=dtype) for part in (train, validation)]
    for part, which in zip(parts, ("training", "validation"), strict=True):
        if len(part) <= context:
            raise ShapeError(
                f"{name} gives {len(part)} {which} tokens; wanted more than the context of {context}; "
                f"use a longer text, or a shorter context"
            )
    ratio = len(validation.encode("utf-8", errors="replace")) / len(parts[1])
    return Corpus(name, parts[0], parts[1], ratio, tokenizer.vocab_size)


def library_texts() -> tuple[str, str]:
    """The sources of Python's standard library, without its tests: (to learn, to be judged by), divided by files.

    Raises:
        ShapeError: this Python has no sources beside it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    texts = [text for text in texts if text.strip()]
    if len(texts) < HELD_OUT:
        raise ShapeError(f"{root} holds {len(texts)} sources; wanted the standard library; name a text with --text FILE")
    held = texts[HELD_OUT // 2 :: HELD_OUT]
    kept = [text for index, text in enumerate(texts) if index % HELD_OUT != HELD_OUT // 2]
    return "\n".join(kept), "\n".join(held)


def windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Sequences and, shifted by one, what follows each token.

    Args:
        tokens: (n,) integers.
        starts: (B,) integers, where the sequences start, at most n - context - 1.
        context: tokens of a sequence.

    Returns:
        (B, context) int64 inputs, (B, context) int64 targets.

    Example:
        >>> windows(torch.arange(9), torch.tensor([2]), 3)
        (tensor([[2, 3, 4]]), tensor([[3, 4, 5]]))
    """
    rows = tokens[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def random_windows(tokens: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """`windows` at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return windows(tokens, torch.randint(len(tokens) - context, (batch,), generator=generator), context)


def even_windows(tokens: Tensor, count: int, context: int) -> tuple[Tensor, Tensor]:
    """At most `count` `windows` spread evenly over the tokens."""
    last = len(tokens) - context - 1
    count = min(count, last // context + 1)
    return windows(tokens, torch.linspace(0, last, count).long(), context)
