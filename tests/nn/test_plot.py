"""Attention maps: the right coefficients, whatever the slices, on axes that show the tokens."""

from pathlib import Path

import pytest
import torch

from andrea_triton import ShapeError, attention_weights
from andrea_triton.nn import Andrea, AndreaConfig, attention_map
from andrea_triton.nn.plot import head_weights, printable


def model_with(window: int | None) -> Andrea:
    return Andrea(AndreaConfig(256, 32, 4, 2, 64, n_kv_head=2, window=window, dropout=0.5))


@pytest.mark.parametrize("window", [None, 5])
def test_rows_are_the_head_own(window: int | None) -> None:
    """The first layer's heads can be recomputed by hand from the embeddings."""
    model, tokens = model_with(window), list(b"some text")
    x = model.tokens(torch.tensor([tokens])) + model.positions(torch.arange(9))
    q, k, _ = model.blocks[0].attention.project(model.blocks[0].attention_norm(x), None)
    wanted = attention_weights(q, k, causal=True, window=window)[0].detach()
    for head in range(4):
        got = head_weights(model, tokens, 0, head, slice_rows=4)
        torch.testing.assert_close(got, wanted[head])
    assert model.training and (got >= 0).all() and got.triu(1).abs().max() == 0
    torch.testing.assert_close(got.sum(-1), torch.ones(9))


def test_slices_change_nothing() -> None:
    model, tokens = model_with(None), list(range(50))
    whole, sliced = (head_weights(model, tokens, 1, 3, slice_rows=n) for n in (64, 7))
    torch.testing.assert_close(whole, sliced)


def test_figure_shows_tokens_and_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = attention_map(model_with(None), "a $b$\n", 1, 2, path=tmp_path / "map.png")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "␣", "$", "b", "$", "\\n"]
    assert axes.get_title(loc="left") == "layer 1, head 2"
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_exist_is_named() -> None:
    model = model_with(None)
    for text, layer, head, message in (
        ("", 0, 0, "text is empty"),
        ("a", 2, 0, "layer is 2; the model has 2; wanted 0 to 1"),
        ("a", 0, -1, "head is -1; the model has 4"),
        ("a" * 65, 0, 0, "a sequence has 65 tokens; the context is 64"),
    ):
        with pytest.raises(ShapeError, match=message):
            attention_map(model, text, layer, head)
    assert printable("\N{REPLACEMENT CHARACTER}") and printable("") == "∅"
