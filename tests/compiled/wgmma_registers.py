"""Registers of warpgroup products, in every order that a program may take: read off its text, before it runs.

Until a product has been waited for nobody may touch its accumulators, and nobody may write to the registers of its matrix A. From
an access to one of them to a product that takes it there must be a wgmma.fence; only products of one shape may pass
accumulators on without. Source: PTX ISA 8.8, chapter 9.7.15.7.1 (wgmma.fence).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tests.compiled import wgmma
from tests.compiled.faults import Race
from tests.compiled.parse import Address, Instruction, Operand, Program

Names = frozenset[str]
NONE: Names = frozenset()
MOST_GROUPS = 8  # groups that are told apart; older ones count as one


class Flight(NamedTuple):
    """Registers of products under way: accumulators, each as "shape register", and those of matrices A."""

    accumulators: Names = NONE
    inputs: Names = NONE

    def join(self, other: Flight) -> Flight:
        return Flight(self.accumulators | other.accumulators, self.inputs | other.inputs)


class Facts(NamedTuple):
    """What may hold at a place of the program: registers touched since the last fence, products issued and not yet committed,
    groups that were committed, the newest last."""

    touched: Names
    issued: Flight
    groups: tuple[Flight, ...]

    def join(self, other: Facts) -> Facts:
        """What holds where two ways meet."""
        length = max(len(self.groups), len(other.groups))
        mine, theirs = ((Flight(),) * (length - len(x.groups)) + x.groups for x in (self, other))
        groups = tuple(one.join(two) for one, two in zip(mine, theirs, strict=True))
        return Facts(self.touched | other.touched, self.issued.join(other.issued), groups)

    def flight(self) -> Flight:
        """All products under way."""
        result = self.issued
        for group in self.groups:
            result = result.join(group)
        return result


def check(program: Program) -> None:
    """Follow every way through the program.

    Raises:
        Race: an access that some way does not order.
    """
    held = frozenset(name for x in program.instructions if wgmma.PRODUCT.fullmatch(x.opcode) for name in _taken(x))
    if not held:
        return
    starts = sorted({0, *program.labels.values(), *(i + 1 for i, x in enumerate(program.instructions) if x.opcode == "bra")})
    ends = dict(zip(starts, [*starts[1:], len(program.instructions)], strict=True))
    known = {0: Facts(held, Flight(), ())}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        facts, end = known[at], ends[at]
        for instruction in program.instructions[at:end]:
            facts = _after(instruction, facts, held, program)
        for following in _following(program, end):
            joined = known[following].join(facts) if following in known else facts
            if following in ends and joined != known.get(following):
                known[following] = joined
                waiting.append(following)


def _following(program: Program, end: int) -> Iterator[int]:
    """Where a block that ends before instruction `end` may go on."""
    last = program.instructions[end - 1]
    if last.opcode.startswith("bra"):
        yield program.labels[str(last.operands[0])]
    if last.guard or last.opcode not in ("bra", "bra.uni", "ret"):
        yield end


def _after(instruction: Instruction, facts: Facts, held: Names, program: Program) -> Facts:
    opcode, groups = instruction.opcode, facts.groups
    if opcode == wgmma.FENCE:
        return facts._replace(touched=NONE)
    if opcode == wgmma.COMMIT:
        groups = (*groups, facts.issued)
        if len(groups) > MOST_GROUPS:
            groups = (groups[0].join(groups[1]), *groups[2:])
        return facts._replace(issued=Flight(), groups=groups)
    if opcode == wgmma.WAIT:
        most = int(str(instruction.operands[0]), 0)
        return facts._replace(groups=groups[max(len(groups) - most, 0) :])
    if match := wgmma.PRODUCT.fullmatch(opcode):
        return _issued(instruction, match[0], facts, program)
    touched = frozenset(_names(instruction.operands)) & held
    if not touched:
        return facts
    flight, written = facts.flight(), _names(instruction.operands[:1], bases=False)
    accumulators = {name.split()[1] for name in flight.accumulators}
    if wrong := (touched & accumulators) | (flight.inputs & frozenset(written)):
        raise _fault(instruction, program, f"{min(wrong)} of a product that has not been waited for is touched")
    return facts._replace(touched=facts.touched | touched)


def _issued(instruction: Instruction, shape: str, facts: Facts, program: Program) -> Facts:
    """A product joins those under way."""
    d, a, *_ = instruction.operands
    accumulators, inputs = frozenset(_names((d,))), frozenset(_names((a,)) if isinstance(a, tuple) else ())
    if wrong := (accumulators | inputs) & facts.touched:
        raise _fault(instruction, program, f"no wgmma.fence since {min(wrong)} was touched")
    flight, passed_on = facts.flight(), frozenset(f"{shape} {name}" for name in accumulators)
    others, every = ({name.split()[1] for name in x} for x in (flight.accumulators - passed_on, flight.accumulators))
    if wrong := (accumulators & others) | (inputs & every) | (accumulators & flight.inputs):
        raise _fault(instruction, program, f"{min(wrong)} of a product that has not been waited for is touched")
    return facts._replace(issued=facts.issued.join(Flight(passed_on, inputs)))


def _taken(product: Instruction) -> list[str]:
    """Registers of the accumulators and of A; the register of A's descriptor is read at the issue."""
    return [name for x in product.operands[:2] if isinstance(x, tuple) for name in _names((x,))]


def _names(operands: tuple[Operand, ...], bases: bool = True) -> list[str]:
    """Names in operands; bases: those of addresses too."""
    found: list[str] = []
    for operand in operands:
        if isinstance(operand, Address):
            found += [operand.base] if bases else []
        else:
            found += [operand] if isinstance(operand, str) else operand
    return found


def _fault(instruction: Instruction, program: Program, text: str) -> Race:
    return Race(f"{text}; {program.name}, {instruction.place}: {instruction.opcode}")
