"""Compile a Launch for a GPU target, with or without that GPU, and start it.

The signature is made here rather than by Triton's own launcher, because it decides what a new value costs: pointers and strides
carry divisibility hints, lengths carry none and are never specialised, so that a new length never compiles a new kernel.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea_triton.errors import CompileError
from andrea_triton.kernels.views import View
from andrea_triton.launch.faults import explained
from andrea_triton.launch.plan import Launch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
Path = tuple[int, ...]

# The interpreter changes Triton's language, which all threads share: who compiles or interprets holds this. A forked child has
# but one thread, so it must not start with a lock that another one held.
language = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=language.acquire, after_in_parent=language.release, after_in_child=language.release)


class Argument(NamedTuple):
    """What the compiler is told of one argument: its type, whether it is divisible by 16, its value if it is a constant."""

    type: str
    hint: bool = False
    constant: Any = None


def describe(x: Any, aligned: bool = False) -> Argument | tuple[Any, ...]:
    """The Argument of a value, or a tuple of them for a tuple. Strides of a View are hinted all or none: with a row stride that
    is not divisible by 16 the others help nothing, and whether they are may change with the length.

    Raises:
        CompileError: no kernel can take such a value."""
    if isinstance(x, TensorDescriptor):
        return Argument(f"tensordesc<{POINTERS[x.base.dtype][1:]}{list(x.block_shape)}>")
    if isinstance(x, torch.Tensor):
        return Argument(POINTERS[x.dtype], x.data_ptr() % 16 == 0)
    if x is None or isinstance(x, (JITFunction, tl.dtype)):
        return Argument("constexpr", constant=x)
    if isinstance(x, tl.constexpr):
        return Argument("constexpr", constant=x.value)
    if isinstance(x, tuple):
        aligned = isinstance(x, View) and x.stride_t % 16 == 0 and x.stride_h % 16 == 0 and x.stride_b % 16 == 0
        fields = getattr(x, "_fields", ("",) * len(x))
        return tuple([describe(y, aligned and n.startswith("stride")) for y, n in zip(x, fields, strict=True)])
    if isinstance(x, np.float64):
        return Argument("fp64")
    if isinstance(x, float):
        return Argument("fp32")
    if isinstance(x, (int, np.int64)):
        wide = isinstance(x, np.int64) or not -(2**31) <= x < 2**31
        return Argument("i64" if wide else "i32", aligned)
    raise CompileError(
        f"a kernel argument is a {type(x).__name__}; wanted a tensor, a number, None, a jit function or a tuple of these"
    )


def flatten(x: Any) -> list[Any]:
    """The run-time arguments among (nested) values, in the order of the compiled kernel's parameters."""
    if isinstance(x, tuple):
        return [leaf for y in x for leaf in flatten(y)]
    return [] if x is None or isinstance(x, (JITFunction, tl.dtype, tl.constexpr)) else [x]


def rebuild(values: tuple[Any, ...], like: Any) -> Any:
    """A tuple of the same NamedTuple type as `like`."""
    return type(like)(*values) if hasattr(like, "_fields") else values


def _collect(x: Any, path: Path, value: Any, constants: dict[Path, Any], hints: dict[Path, Any]) -> Any:
    """Type strings in the shape of the value; constants and hints by path."""
    if not isinstance(x, Argument):
        parts = tuple(_collect(y, (*path, i), value[i], constants, hints) for i, y in enumerate(x))
        return rebuild(parts, value)
    if x.type == "constexpr":
        constants[path] = x.constant
    elif x.hint:
        hints[path] = [["tt.divisibility", 16]]
    return x.type


def source(launch: Launch) -> ASTSource:
    """The kernel with its signature, constants and hints: what Triton compiles."""
    constants: dict[Path, Any] = {}
    hints: dict[Path, Any] = {}
    signature: dict[str, Any] = {}
    values = iter(launch.args)
    for i, name in enumerate(launch.kernel.arg_names):
        if name in launch.constexprs:
            signature[name], constants[(i,)] = "constexpr", launch.constexprs[name]
        else:
            value = next(values)
            signature[name] = _collect(describe(value), (i,), value, constants, hints)
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=hints)


def gpu_target(name: str) -> GPUTarget:
    """Triton's target from a name such as sm_80 or gfx942. Raises CompileError for a name of another form."""
    if name.startswith("sm_") and name[3:].isdigit():
        return GPUTarget("cuda", int(name[3:]), 32)
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise CompileError(f"target is {name!r}; wanted a compute capability such as sm_80, or an AMD architecture such as gfx942")


def compiled(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """The machine code of a launch. Triton keeps it on disk, so a second process does not compile it again."""
    options: dict[str, Any] = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
    options["enable_fp_fusion"] = launch.fusible
    if target.backend == "cuda":
        options["maxnreg"] = launch.config.registers()
    with explained(f"{launch.name} did not compile for {target.backend} {target.arch}"), language:
        kernel = triton.compile(source(launch), target=target, options=options)
        kernel.src = Flat(launch.kernel, dict(enumerate(_types(tuple(kernel.src.signature.values())))))
        return kernel


class Flat(NamedTuple):
    """What a kernel's launcher is made for: the run-time arguments alone, one after the other, as `flatten` gives them."""

    fn: Any
    signature: dict[int, str]


def _types(signature: Any) -> list[str]:
    if isinstance(signature, tuple):
        return [leaf for part in signature for leaf in _types(part)]
    return [] if signature == "constexpr" else [signature]
