"""Host tensor descriptors: tiles that a GPU's copy engine (TMA, from sm_90 on) fetches whole, in place of a pointer per element.

A descriptor knows a tensor's true sizes, so rows past the end arrive as zeros; it knows nothing of a sequence within the tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea_triton.kernels.views import View
from andrea_triton.launch.configs import Config, family
from andrea_triton.memory import Memory
from andrea_triton.problem import Problem
from andrea_triton.target import ensure_context

# Which side of the tile a kernel's argument is cut along.
SIDES = {
    "forward": {"q": "BLOCK_M", "k": "BLOCK_N", "v": "BLOCK_N"},
    "dkdv": {"q": "BLOCK_M", "do": "BLOCK_M"},
    "dq": {"k": "BLOCK_N", "v": "BLOCK_N"},
}
FAMILIES = ("hopper", "blackwell")
GRANULE = 16  # bytes that addresses and strides are to be multiples of
LARGEST_BOX = 256  # elements of a box along one dim


def described(name: str, args: dict[str, Any], problem: Problem, target: str) -> bool:
    """Whether the tiles of a launch come by descriptors: never a question of a length."""
    packed_or_cut = problem.packed or problem.extras.key_lengths is not None
    if name not in SIDES or family(target) not in FAMILIES or packed_or_cut:
        return False
    # Plain arithmetic reads a tile element by element; in the order in which the copy engine leaves it, that spills registers.
    if problem.dtype == torch.float32 and args["attention"].precision.value == "ieee":
        return False
    whole = all(16 <= d <= LARGEST_BOX and d & (d - 1) == 0 for d in (problem.D, problem.DV))
    return whole and all(_fits(args[side]) for side in SIDES[name])


def _fits(view: View) -> bool:
    t = view.ptr
    size = t.element_size()
    strides = [stride * size for stride, n in zip(t.stride()[:3], t.shape[:3], strict=True) if n > 1]
    aligned = t.data_ptr() % GRANULE == 0 and all(0 < s < 2**40 and s % GRANULE == 0 for s in strides)
    return aligned and t.numel() > 0 and t.dtype.itemsize < 8


def with_descriptors(name: str, args: dict[str, Any], config: Config) -> dict[str, Any]:
    """The arguments with a descriptor in each view, for the boxes of a tiling."""
    return {arg: _box(x, getattr(config, SIDES[name][arg])) if arg in SIDES[name] else x for arg, x in args.items()}


def _box(view: View, rows: int) -> View:
    t = view.ptr
    return view._replace(desc=TensorDescriptor(t, list(t.shape), natural_strides(t), [1, 1, rows, t.shape[3]]))


def natural_strides(t: Tensor) -> list[int]:
    """The strides of a tensor; of a dim of one element, which is never stepped over and whose stride may be any, that of a dense
    tensor: behind all that the dims inside it reach. TMA wants a multiple of its granule, and may take a stride that is too small
    for an overlap."""
    strides = [*t.stride()[:-1], 1]
    for i in reversed(range(t.dim() - 1)):
        if t.shape[i] == 1:
            strides[i] = max(stride * n for stride, n in zip(strides[i + 1 :], t.shape[i + 1 :], strict=True))
    return strides


def without_descriptors(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with bare pointers in their views."""
    return tuple(x._replace(desc=None) if isinstance(x, View) else x for x in args)


def expanded(arguments: list[Any]) -> tuple[Any, ...]:
    """The arguments in the order of the compiled kernel's parameters: a descriptor brings its sizes and strides with it."""
    parts = ((x, *x.shape, *x.strides) if isinstance(x, TensorDescriptor) else (x,) for x in arguments)
    return tuple(x for part in parts for x in part)


class Address(NamedTuple):
    """Of a tensor, in the place of the tensor: all that Triton's launcher asks of the base of a descriptor."""

    value: int

    def data_ptr(self) -> int:
        """The address."""
        return self.value


class Box(NamedTuple):
    """A descriptor without its address: what lasts of it from call to call.

    Args:
        place: of its tensor's address among the addresses of a call.
        how: what Triton's compiler says of the descriptor: element type, box, swizzle.
        maps: what Triton encoded of it for the copy engine, by address: with the rest of a Box that is all that a map holds, so
            another tensor at the same address, which has another Box or the same map, cannot be taken for this one.
        shape, strides, padding, round_f32_to_tf32: as Triton reads them.
        base: an Address, while the map is made.
    """

    place: int
    how: Any
    maps: Memory
    shape: list[int]
    strides: list[int]
    padding: str
    round_f32_to_tf32: bool
    base: Address = Address(0)


def box_of(descriptor: TensorDescriptor, place: int, how: Any) -> Box:
    """What lasts of a descriptor."""
    tf32 = getattr(descriptor, "round_f32_to_tf32", False)
    return Box(place, how, Memory(), descriptor.shape, descriptor.strides, descriptor.padding, tf32)


def tensor_map(box: Box, address: int) -> Any:
    """The map of a tensor at an address, as the driver encodes it: made once, for that takes longer than a kernel's start."""
    return box.maps.get(address) or box.maps.keep(address, _encoded(box._replace(base=Address(address))))


def _encoded(box: Box) -> Any:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    ensure_context()
    more = make_tensordesc_arg.__code__.co_argcount - 2  # which are for kinds of kernels that are none of ours
    return make_tensordesc_arg(box, box.how, *(None,) * more)[0]


def take_over(kernel: Any) -> list[Any]:
    """Of a compiled kernel that is not loaded yet: let its launcher take descriptors encoded, each with its sizes and strides
    after it, rather than encode them at every start. Returns `how` of each descriptor's Box."""
    hows = list(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    if hows:
        types: list[str] = []
        for kind in kernel.src.signature.values():
            rank = kind.partition("[")[2].count(",") + 1
            types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank] if kind.startswith("tensordesc") else [kind]
        kernel.src = kernel.src._replace(signature=dict(enumerate(types)))
        kernel.metadata = kernel.metadata._replace(tensordesc_meta=None)
    return hows
