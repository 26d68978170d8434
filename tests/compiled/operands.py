"""Operands of instructions: how a register, a number, a special register or an address is read, and a result written."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.compiled.faults import MemoryFault, Unsupported
from tests.compiled.parse import Address, Operand, Program
from tests.compiled.state import State
from tests.compiled.values import Array

Read = Callable[[State], Array]
Write = Callable[[State, Array], None]
RAW = {0: np.dtype(bool), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_SPECIAL: dict[str, Read] = {
    "%tid.x": lambda state: np.arange(state.threads, dtype=np.uint32)[None],
    "%ctaid.x": lambda state: state.ctas[:, :1].astype(np.uint32),
    "%ctaid.y": lambda state: state.ctas[:, 1:].astype(np.uint32),
    "%nctaid.y": lambda state: np.full((1, 1), state.grid[1], np.uint32),
}


def reader(operand: Operand, kind: np.dtype, program: Program, low: bool = False) -> Read:
    """A function from the state to the operand's value, of type `kind`, broadcastable to [ctas, threads].
    low: a wider register gives its low bits, as conversions allow.

    Raises:
        Unsupported: it is no operand of that type.
    """
    if isinstance(operand, tuple):
        return _packed(operand, kind, program)
    negated = operand.startswith("!")
    name = operand.removeprefix("!")
    if name in program.registers:
        raw = RAW[program.registers[name]]
        if low and raw.itemsize > kind.itemsize > 1 and kind.kind in "iu":
            unsigned = np.dtype(f"u{kind.itemsize}")
            return lambda state: _register(state, name).astype(unsigned).view(kind)
        if raw.itemsize != kind.itemsize or negated != (negated and kind.kind == "b"):
            raise Unsupported(f"{operand} read as {kind}")
        return (lambda state: ~_register(state, name)) if negated else (lambda state: _register(state, name).view(kind))
    if name in _SPECIAL and kind.itemsize == 4:
        return _SPECIAL[name]
    value = _constant(operand, kind, program)
    return lambda state: value


def _register(state: State, name: str) -> Array:
    try:
        return state.registers[name]
    except KeyError:
        raise MemoryFault(f"a read of register {name} before it is written") from None


def _packed(operand: Operand, kind: np.dtype, program: Program) -> Read:
    """{low, high} as one number."""
    if isinstance(operand, Address):
        raise Unsupported(f"{operand} as a number")
    raw = RAW[kind.itemsize // len(operand)]
    parts = [reader(part, raw, program) for part in operand]

    def read(state: State) -> Array:
        values = np.broadcast_arrays(*[part(state) for part in parts])
        return np.ascontiguousarray(np.stack(values, -1)).view(kind)[..., 0]

    return read


def _constant(text: Operand, kind: np.dtype, program: Program) -> Array:
    if text in program.shared:
        return np.zeros((1, 1), kind)
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise Unsupported(f"operand {text!r}")
    if kind.kind == "b":
        return np.full((1, 1), int(text) != 0)
    bits = int(text[2:], 16) if text[1:2] in ("f", "F", "d", "D") else int(text.removesuffix("U"), 0)
    return np.frombuffer((bits % 2 ** (8 * kind.itemsize)).to_bytes(kind.itemsize, "little"), kind).reshape(1, 1)


def writer(operand: Operand, kind: np.dtype, program: Program, guard: str) -> Write:
    """A function that writes a value of type `kind` to a register, or its parts to {low, high}; where the guard holds."""
    if isinstance(operand, tuple) and not isinstance(operand, Address):
        return _unpacked(operand, kind, program, guard)
    if operand not in program.registers or RAW[program.registers[operand]].itemsize != kind.itemsize:
        raise Unsupported(f"a {kind} written to {operand}")
    name, raw = str(operand), RAW[program.registers[operand]]
    if not guard:
        return lambda state, value: state.registers.__setitem__(name, value.view(raw))
    holds = reader(guard, np.dtype(bool), program)

    def write(state: State, value: Array) -> None:
        state.registers[name] = np.where(holds(state), value.view(raw), state.registers.get(name, raw.type(0)))

    return write


def _unpacked(parts: tuple[str, ...], kind: np.dtype, program: Program, guard: str) -> Write:
    raw = RAW[kind.itemsize // len(parts)]
    writes = [None if part == "_" else writer(part, raw, program, guard) for part in parts]

    def write(state: State, value: Array) -> None:
        halves = np.ascontiguousarray(value)[..., None].view(raw)
        for i, one in enumerate(writes):
            if one is not None:
                one(state, halves[..., i])

    return write


def address(operand: Operand, wide: bool, program: Program) -> Read:
    """Byte addresses: uint64 of global memory (wide), int64 of shared memory."""
    if not isinstance(operand, Address):
        raise Unsupported(f"{operand!r} as an address")
    base = reader(operand.base, np.dtype("u8" if wide else "u4"), program)
    if wide:
        offset = np.uint64(operand.offset % 2**64)
        return lambda state: base(state) + offset
    return lambda state: base(state).astype(np.int64) + operand.offset
