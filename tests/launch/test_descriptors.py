"""What the copy engine is told of a tensor."""

import pytest
import torch

from andrea_triton.launch.configs import Config
from andrea_triton.launch.descriptors import GRANULE, natural_strides, with_descriptors
from andrea_triton.launch.plan import view


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 3, 1, 64), (2, 1, 5, 32), (1, 1, 7, 16), (1, 4, 9, 64), (2, 3, 1, 64)])
@pytest.mark.parametrize("rows", [False, True], ids=["(B, H, T, D)", "(B, T, H, D)"])
def test_dims_of_one_element_have_the_strides_of_a_dense_tensor(shape: tuple[int, ...], rows: bool) -> None:
    """Whatever they say themselves: one of 16 bytes would make a dense tensor look as if its rows overlapped."""
    B, H, T, D = shape
    dense = torch.empty(B, T, H, D).transpose(1, 2) if rows else torch.empty(shape)
    strange = dense.as_strided(shape, [s if n > 1 else 4 for s, n in zip(dense.stride(), shape, strict=True)])
    found = natural_strides(strange)
    reached = [s * n for s, n in zip(found, shape, strict=True)]
    assert all(found[i] == dense.stride(i) for i in range(4) if shape[i] > 1)
    for i in range(3):
        if shape[i] == 1:
            assert found[i] == max(reached[i + 1 :])
    assert max(reached) == dense.numel(), "no larger than the tensor"


def test_the_map_of_a_slice_of_qkv() -> None:
    """One sequence, of tensors that lie side by side: strides that the engine takes."""
    q = torch.empty(1, 40, 3, 2, 64, dtype=torch.float16)[:, :, 1].transpose(1, 2)
    made = with_descriptors("dq", {"k": view(q, False), "v": view(q, False)}, Config(64, 32))
    desc = made["k"].desc
    assert list(desc.shape) == [1, 2, 40, 64] and list(desc.strides) == [384 * 40, 64, 384, 1]
    assert list(desc.block_shape) == [1, 1, 32, 64] and all(s * 2 % GRANULE == 0 for s in desc.strides[:3])
