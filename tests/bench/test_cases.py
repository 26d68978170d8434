"""The text and the inputs made from it."""

import pytest
import torch

from bench.cases import TEXT, Case, make_inputs, text_tokens


def test_the_canto_is_whole() -> None:
    lines = TEXT.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 136
    assert lines[0] == "Nel mezzo del cammin di nostra vita"
    assert lines[-1] == "Allor si mosse, e io li tenni dietro."
    assert all(line == line.strip() and line for line in lines)


def test_tokens_are_the_bytes_and_start_anew_at_the_end() -> None:
    data = TEXT.read_bytes()
    tokens = text_tokens(1, len(data) + 10)[0].tolist()
    assert bytes(tokens[: len(data)]) == data
    assert tokens[len(data) :] == tokens[:10]


def test_sequences_of_a_batch_read_different_places() -> None:
    first, second = text_tokens(2, 64)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_have_the_shape_and_memory_of_a_gpt_block(dtype: str) -> None:
    inputs = make_inputs(Case(length=7, heads=4, kv_heads=2, head_dim=8, batch=2, dtype=dtype))
    assert [tuple(x.shape) for x in inputs] == [(2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 4, 7, 8)]
    assert all(x.dtype == getattr(torch, dtype) for x in inputs)
    assert all(x.transpose(1, 2).is_contiguous() for x in inputs)


def test_inputs_are_the_same_every_time_and_of_unit_size() -> None:
    case = Case(length=64)
    first, second = make_inputs(case), make_inputs(case)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(0.9 < float(x.std()) < 1.1 for x in first)


def test_score_bytes() -> None:
    assert Case(length=1024).score_bytes == 12 * 1024 * 1024 * 4
    assert Case(length=1024, dtype="bfloat16", batch=2).score_bytes == 2 * 12 * 1024 * 1024 * 2


def test_a_name_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="'nn'; wanted the name of a torch dtype"):
        make_inputs(Case(length=1, dtype="nn"))
