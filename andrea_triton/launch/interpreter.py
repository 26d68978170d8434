"""Run a Launch on CPU tensors in Triton's interpreter, chosen at call time: no environment variable, and ahead-of-time
compilation goes on working in the same process.

For the length of a launch, under a lock that compiling takes too, device functions run as Python and the language is patched
as the interpreter wants it; all is put back after. Matrix products are widened: the stock interpreter multiplies the bit
patterns of bf16. Numbers are rounded to bf16 as hardware rounds them: the stock interpreter cuts them off, which makes every
weight too small.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from andrea_triton import target as targets
from andrea_triton.launch.compile import POINTERS, language, rebuild
from andrea_triton.launch.plan import Launch

_python: dict[Any, Callable[..., Any]] = {}
_stock_cast = interpreter.InterpreterBuilder.cast_impl
_stock_min_max = interpreter.ReduceOps.min_max
_stock_patch_tensor = interpreter._patch_lang_tensor
_SILENT = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}


def _as_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """A jit function's body as the interpreter runs it, rewritten once."""
    if function not in _python:
        _python[function] = interpreter.InterpretedFunction(function).rewrite()
    return _python[function]


def _call_device_function(self: JITFunction, *args: Any, **keywords: Any) -> Any:
    return _as_python(self.fn)(*args, **keywords)


def _from_bf16(bits: Any) -> Any:
    """fp32 values of bf16 bit patterns, the form in which bf16 lies in the interpreter."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: Any) -> Any:
    """bf16 bit patterns of fp32 values, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _cast(self: Any, handle: Any, wanted: Any) -> Any:
    """The handle's values in another type."""
    source, kind = handle.dtype.scalar, wanted.scalar
    if kind == tl.bfloat16 and source != kind:
        return interpreter.TensorHandle(_to_bf16(handle.data.astype(np.float32)), kind)
    if (source, kind) == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_from_bf16(handle.data), kind)
    return _stock_cast(self, handle, wanted)


def _wide(handle: Any) -> Any:
    """The values of an operand in fp64."""
    return (_from_bf16(handle.data) if handle.dtype.scalar == tl.bfloat16 else handle.data).astype(np.float64)


def _wide_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """acc + a b, summed in fp64 and rounded once: the same for a b and its transpose, as on a matrix unit, which numpy's fp32
    product is not."""
    return interpreter.TensorHandle((_wide(a) @ _wide(b) + d.data).astype(d.data.dtype), d.dtype.scalar)


def _min_max(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """The largest or smallest, NaN where all are NaN: of those the stock interpreter warns its user."""
    return _stock_min_max(self, values, _SILENT.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """The stock patch, and an index out of an array of one element: Triton 3.6 leaves that to int(), where numpy 2.4 raises."""
    _stock_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """The interpreter's world. Its overflow checks are off: they take half of the time, and without debug say nothing."""
    builder, one = interpreter.InterpreterBuilder, interpreter.interpreter_builder
    with language, np.errstate(all="ignore"):
        call, dot, options = JITFunction.__call__, builder.create_dot, one.options
        one.options = replace(options, sanitize_overflow=False)
        JITFunction.__call__, builder.create_dot, builder.cast_impl = _call_device_function, _wide_dot, _cast
        interpreter.ReduceOps.min_max, interpreter._patch_lang_tensor = _min_max, _patch_tensor
        scope = interpreter._patch_lang(getattr(tl.standard.sum, "fn", tl.standard.sum))
        try:
            yield
        finally:
            if scope is not None:
                scope.restore()
            JITFunction.__call__, builder.create_dot, builder.cast_impl = call, dot, _stock_cast
            interpreter.ReduceOps.min_max, interpreter._patch_lang_tensor = _stock_min_max, _stock_patch_tensor
            one.options = options


def _scalar(value: Any, numpy_type: Any, type_name: str) -> tl.tensor:
    kind = tl.str_to_ty(type_name, None)
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=numpy_type), kind), kind)


def _convert(x: Any) -> Any:
    """An argument as the kernel sees it, typed as launch/compile.py types it."""
    if isinstance(x, torch.Tensor):
        return _scalar(x.data_ptr(), np.uint64, POINTERS[x.dtype])
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, tuple):
        return rebuild(tuple(_convert(y) for y in x), x)
    if isinstance(x, np.float64):
        return _scalar(x, np.float64, "fp64")
    if isinstance(x, float):
        return _scalar(x, np.float32, "fp32")
    if isinstance(x, (int, np.int64)):
        wide = isinstance(x, np.int64) or not -(2**31) <= x < 2**31
        return _scalar(x, np.int64 if wide else np.int32, "i64" if wide else "i32")
    return x


def interpret(launch: Launch) -> None:
    """Run every program of a launch, one after another, on CPU tensors.

    Raises:
        UnsupportedError: the installed Triton's interpreter is not one that this works with.
    """
    try:
        _interpret(launch, (*launch.grid, 1, 1)[:3])
    except (AttributeError, TypeError, ImportError) as error:
        targets.blame_triton(error)
        raise


def _interpret(launch: Launch, grid: tuple[int, ...]) -> None:
    with _patched():
        body, args = _as_python(launch.kernel.fn), [_convert(x) for x in launch.args]
        undo = interpreter._patch_lang(launch.kernel.fn)
        try:
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for index in np.ndindex(*grid):
                interpreter.interpreter_builder.set_grid_idx(*index)
                body(*args, **launch.constexprs)
        finally:
            if undo is not None:
                undo.restore()
