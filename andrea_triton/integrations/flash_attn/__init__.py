"""flash-attn 2's functions by this library: the same names, signatures and meanings, so that code changes one import.

    from andrea_triton.integrations.flash_attn import flash_attn_func        # was: from flash_attn import flash_attn_func

The names are those of flash-attn 2.8: this package's own, `flash_attn_interface` with the functions that autograd does not see
(`_flash_attn_forward` and its kin, which rings and pipelines call), `bert_padding` and `layers.rotary`.

Beyond flash-attn: any float dtype, head dims from 1, values of another head dim, any device, pages of any size, left padding
together with pages, a gradient through pages. Three things differ. A query that sees no key has lse -inf, where flash-attn
writes +inf. The weights that return_attn_probs gives with dropout are not padded to multiples of 128. And slopes that require a
gradient are an error, where flash-attn gives them none.

Numbers may be Python's, NumPy's or tensors of one element. A softmax_scale that requires a gradient gets it: q is multiplied by
it, in q's dtype. deterministic is taken and always true: the gradients are the same bits every time. num_splits is
the number of parts of the keys in `flash_attn_with_kvcache`, 0 for the library's choice.
"""

from .bert_padding import index_first_axis, pad_input, unpad_input
from .dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .kvcache import flash_attn_with_kvcache
from .layers.rotary import apply_rotary_emb
from .lowlevel import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward, _flash_attn_varlen_forward
from .varlen import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__version__ = "2.8.3"  # the version of flash-attn whose names and meanings these are; libraries compare it

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "apply_rotary_emb",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "index_first_axis",
    "pad_input",
    "unpad_input",
]
