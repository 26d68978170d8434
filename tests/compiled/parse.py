"""PTX text to a Program: registers, parameters, and instructions with their operands taken apart.

Source: PTX ISA 8.8, chapters 4 (syntax) and 5 (state spaces).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.compiled.faults import Unsupported


class Address(NamedTuple):
    """[base + offset]: base is a register, a symbol or a parameter."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]


class Instruction(NamedTuple):
    """One statement: `opcode` with all its suffixes, its operands, and the predicate that guards it ("" for none)."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str
    place: str


class Program(NamedTuple):
    """A kernel.

    Args:
        name: of the kernel.
        parameters: bytes of each parameter by its name, in order.
        threads: of a CTA.
        registers: bytes of each register by its name; 0 for a predicate.
        instructions: in the order of the text.
        labels: index of the instruction that follows each label.
        shared: symbols of shared memory; Triton has one, at offset 0.
    """

    name: str
    parameters: dict[str, int]
    threads: int
    registers: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: frozenset[str]


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+\.[bsuf](\d+)\s[^,]*?(\w+)\s*(?:,|$)", re.S)
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[")
_REGISTERS = re.compile(r"\.reg\s+\.(pred|b\d+)\s+(%\w+)<(\d+)>")
_GUARD = re.compile(r"@(!?%\w+)\s+(.*)", re.S)
_ADDRESS = re.compile(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_LABEL = re.compile(r"\s*([$\w]+):")
_LOCATION = re.compile(r"\s*\.loc\s.*//\s*(\S+)")


def parse(text: str) -> Program:
    """The kernel of a PTX text.

    Raises:
        Unsupported: a declaration that Triton does not make.

    Example:
        >>> program = parse(".entry f(.param .u64 .ptr .global .align 1 f_0) .reqntid 32\\n{\\n.reg .b32 %r<2>;\\nret;\\n}")
        >>> program.name, program.parameters, program.registers, program.instructions[0].opcode
        ('f', {'f_0': 8}, {'%r0': 4, '%r1': 4}, 'ret')
    """
    entry = _ENTRY.search(text)
    threads = entry and re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
    if not entry or not threads:
        raise Unsupported("a text without an entry and its number of threads")
    registers: dict[str, int] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    first_line = text.count("\n", 0, entry.end()) + 1
    for statement, place in _statements(text[entry.end() :], first_line):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        elif declared := _REGISTERS.fullmatch(statement):
            size = 0 if declared[1] == "pred" else int(declared[1][1:]) // 8
            registers |= {f"{declared[2]}{i}": size for i in range(int(declared[3]))}
        else:
            instructions.append(_instruction(statement, place))
    parameters = {name: int(bits) // 8 for bits, name in _PARAMETER.findall(entry[2])}
    shared = frozenset(_SHARED.findall(text))
    return Program(entry[1], parameters, int(threads[1]), registers, tuple(instructions), labels, shared)


def _statements(body: str, first_line: int) -> Iterator[tuple[str, str]]:
    """(statement or label, "line n, file:line") up to the end of the kernel. Braces inside it only frame inline assembly."""
    depth, begun, source = 1, "", ""
    for number, line in enumerate(body.split("\n"), start=first_line):
        if location := _LOCATION.match(line):
            source = location[1]
            continue
        line = line.split("//")[0].strip()
        if not begun and (label := _LABEL.fullmatch(line)):
            yield f"{label[1]}:", ""
        elif not begun and line in ("{", "}"):
            depth += 1 if line == "{" else -1
            if depth == 0:
                return
        elif begun or not line.startswith((".pragma", ".file", ".section")):
            *whole, begun = f"{begun} {line}".split(";")
            yield from ((part.strip(), f"PTX line {number}, {source}") for part in whole if part.strip())
            begun = begun.strip()


def _instruction(statement: str, place: str) -> Instruction:
    guarded = _GUARD.fullmatch(statement)
    guard, rest = (guarded[1], guarded[2]) if guarded else ("", statement)
    opcode, *operands = rest.split(None, 1)
    if opcode.startswith("."):
        raise Unsupported(f"{statement!r} at {place}")
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands[0]) if operands else []
    return Instruction(opcode.replace("shared::cta", "shared"), tuple(_operand(piece) for piece in pieces), guard, place)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text.strip("{} ").split(","))
    if address := _ADDRESS.fullmatch(text):
        return Address(address[1], int(address[2] or "0", 0))
    return text
