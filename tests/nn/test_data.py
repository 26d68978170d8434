"""Tokens of texts, the corpus that every machine has, and batches."""

from pathlib import Path

import pytest
import torch

from andrea_triton import ShapeError
from andrea_triton.nn.data import (
    ByteTokenizer,
    FileTokenizer,
    even_windows,
    library_texts,
    random_windows,
    read_corpus,
    windows,
)


def test_bytes_come_back() -> None:
    text = "def f():\n\treturn 'né ∑ 🙂'"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    assert ByteTokenizer().decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
def test_library_is_divided_by_files() -> None:
    train, validation = library_texts()
    assert len(train) > 10 * len(validation) > 1_000_000
    assert validation[:2000] not in train


def test_text_file_is_divided_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab" * 500, encoding="utf-8")
    corpus = read_corpus(path, ByteTokenizer(), 16)
    assert (len(corpus.train), len(corpus.validation), corpus.vocab_size, corpus.bytes_per_token) == (950, 50, 256, 1.0)
    assert corpus.train.dtype == torch.uint8


def test_bad_texts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    with pytest.raises(FileNotFoundError, match=r"text\.txt is no file"):
        read_corpus(path, ByteTokenizer(), 16)
    for text in ("", " \n\n "):
        path.write_text(text)
        with pytest.raises(ShapeError, match=r"text\.txt is empty"):
            read_corpus(path, ByteTokenizer(), 16)
    path.write_text("short " * 40)
    with pytest.raises(ShapeError, match="gives 12 validation tokens; wanted more than the context of 16"):
        read_corpus(path, ByteTokenizer(), 16)


def test_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = FileTokenizer(tmp_path / "tokenizer.json")
    assert ours.vocab_size == 3 and ours.encode("b a c") == [1, 0, 2] and ours.decode([1, 0]) == "b a"
    (tmp_path / "text.txt").write_text("a b " * 500)
    corpus = read_corpus(tmp_path / "text.txt", ours, 16)
    assert corpus.bytes_per_token == 2.0 and len(corpus.validation) == 50
    with pytest.raises(FileNotFoundError, match="no file; wanted a tokenizer"):
        FileTokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ShapeError, match="is no tokenizer file"):
        FileTokenizer(tmp_path / "bad.json")


def test_windows_are_shifted_by_one() -> None:
    inputs, targets = windows(torch.arange(10), torch.tensor([0, 6]), 3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]] and targets.tolist() == [[1, 2, 3], [7, 8, 9]]


def test_random_windows_follow_the_seed_and_reach_both_ends() -> None:
    tokens = torch.arange(8, dtype=torch.uint8)
    first, again, other = (random_windows(tokens, 200, 4, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.min() == 0 and random_windows(tokens, 200, 4, 1)[1].max() == 7


def test_even_windows_cover_the_text_once() -> None:
    inputs, targets = even_windows(torch.arange(101), 100, 10)
    assert inputs.flatten().tolist() == list(range(100)) and targets[-1, -1] == 100
    assert len(even_windows(torch.arange(101), 4, 10)[0]) == 4
