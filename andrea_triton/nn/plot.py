"""Pictures of what attention heads look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ShapeError
from ..functional import attention_weights
from .andrea import Andrea, Block
from .data import ByteTokenizer, Tokenizer
from .weights import needed, replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELS = 96  # beyond it, tokens on the axes could not be read


def attention_map(
    model: Andrea, text: str, layer: int, head: int, *, tokenizer: Tokenizer | None = None, path: Path | str | None = None
) -> Figure:
    """Heat map of one head's coefficients over a text: a row per token that looks, a column per token looked at.

    Coefficients say where a head took its values from, not why the model answered as it did: other coefficients may give the same
    output, later layers mix what earlier ones moved, and a large coefficient on a small value moves little. Take the picture as a
    view of the mechanism, not as an explanation.

    Args:
        model: the model; dropout is off meanwhile.
        text: at least one token, at most the context.
        layer: index of the block, from 0.
        head: index of the query head, from 0.
        tokenizer: of the model; None means bytes.
        path: also write the picture there (.png, .svg, .pdf).

    Returns:
        matplotlib's Figure.

    Raises:
        ShapeError: no such layer or head, or a text that is empty or too long.
        UnsupportedError: matplotlib is not installed.

    Source:
        arXiv 1706.03762, equation 1; arXiv 1902.10186 (attention is not explanation).

    Example:
        >>> from andrea_triton.nn import Andrea, AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=256, d_model=32, n_head=4, n_layer=2, context=16))
        >>> attention_map(model, "to be or not", layer=0, head=1).axes[0].get_title(loc="left")
        'layer 0, head 1'
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    tokens = tokenizer.encode(text)
    weights = head_weights(model, tokens, layer, head)
    figure = needed("matplotlib.figure", "attention_map").Figure(figsize=(7.5, 7.0), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.float().numpy(), cmap="viridis", vmin=0.0, interpolation="nearest")
    axes.set_title(f"layer {layer}, head {head}", loc="left")
    axes.set_xlabel("token looked at")
    axes.set_ylabel("token that looks")
    if len(tokens) <= MOST_LABELS:
        labels = [printable(tokenizer.decode([token])) for token in tokens]
        size = max(3.0, 10.0 - len(labels) / 12)
        axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=size, parse_math=False)
        axes.set_yticks(range(len(labels)), labels, fontsize=size, parse_math=False)
    figure.colorbar(image, ax=axes, label="coefficient", shrink=0.8)
    if path is not None:
        with replacing(path) as new:
            figure.savefig(new, dpi=160, format=Path(path).suffix.lstrip(".") or "png")
    return figure


def head_weights(model: Andrea, tokens: list[int], layer: int, head: int, *, slice_rows: int = 128) -> Tensor:
    """Coefficients of one head over a sequence, computed in slices of rows.

    Args:
        model: the model.
        tokens: of the sequence.
        layer, head: indices from 0.
        slice_rows: rows computed at a time.

    Returns:
        (T, T) on the CPU: rows that sum to 1, 0 above the diagonal.

    Raises:
        ShapeError: no such layer or head, or no tokens, or too many.

    Example:
        >>> from andrea_triton.nn.andrea import AndreaConfig
        >>> model = Andrea(AndreaConfig(vocab_size=256, d_model=32, n_head=4, n_layer=2, context=16))
        >>> head_weights(model, [1, 2, 3], 1, 3).sum(-1).round(decimals=5).tolist()
        [1.0, 1.0, 1.0]
    """
    for name, index, size in (("layer", layer, model.config.n_layer), ("head", head, model.config.n_head)):
        if not 0 <= index < size:
            raise ShapeError(f"{name} is {index}; the model has {size}; wanted 0 to {size - 1}")
    if not tokens:
        raise ShapeError("text is empty; wanted at least one token")
    seen: list[Tensor] = []
    block = model.blocks[layer]
    assert isinstance(block, Block)
    module = block.attention
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.tensor([tokens], device=model.head.weight.device), last=True)
            q, k, _ = module.project(seen[0], torch.arange(len(tokens), device=seen[0].device))
    finally:
        hook.remove()
        model.train(training)
    group, call = module.n_head // module.n_kv_head, module.call()
    k = k[:, head // group : head // group + 1]
    rows = []
    for start in range(0, len(tokens), slice_rows):
        q_slice = q[:, head : head + 1, start : start + slice_rows]
        weights = attention_weights(
            q_slice, k, causal=True, q_start=start, scale=call.scale, window=call.window, softcap=call.softcap, sinks=call.sinks
        )
        rows.append(weights[0, 0].cpu())
    return torch.cat(rows)


def printable(text: str) -> str:
    """A token as it can stand on an axis."""
    return "".join(c if c.isprintable() and not c.isspace() else repr(c)[1:-1] if c != " " else "␣" for c in text) or "∅"
