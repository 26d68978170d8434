"""Hugging Face transformers: attn_implementation="andrea_triton", through the library's own two registries.

attend: the attention of one layer.
paged:  the same within continuous batching.
masks:  the mask of a forward pass, in O(N) where it is a band.
models: which models can have it, which are refused, and how a model wants its masks.
"""

from __future__ import annotations

from .attend import attend
from .masks import BandMask, make_mask
from .models import CONTINUOUS, NAME, allow_continuous, refuse_unfit_models
from .paged import attend_continuous

__all__ = ["CONTINUOUS", "NAME", "BandMask", "attend", "attend_continuous", "make_mask", "register"]


def register() -> None:
    """Make "andrea_triton" an attention of transformers, for models made or switched to it afterwards; and the same under the
    name "andrea_triton_flash" for continuous batching (`generate_batch`), which takes only names of that kind.

    A model takes it by `from_pretrained(..., attn_implementation="andrea_triton")` or
    `model.set_attn_implementation("andrea_triton")`. Calling this again changes nothing.

    transformers checks of a registered name only that it is known. So this call also puts a check behind the method that every
    model asks for its attn_implementation, `PreTrainedModel.get_correct_attn_implementation`: a model that makes its attention
    by itself is refused there with an UnsupportedError, as transformers refuses "sdpa", in place of running without its mask.

    Raises:
        ModuleNotFoundError: transformers is missing: pip install 'andrea-triton[hf]'.

    Source:
        AttentionInterface and AttentionMaskInterface in the documentation of transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    for name, function in ((NAME, attend), (CONTINUOUS, attend_continuous)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, make_mask)
    refuse_unfit_models(PreTrainedModel)
    if hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
        allow_continuous(PreTrainedModel)
