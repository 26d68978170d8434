"""Control flow of disassembled kernels: instructions, basic blocks, loops, and the paths of one trip through a loop.

Both parsers bring their assembly to one form: an instruction names the label it may jump to and says whether the next
one may follow it. Everything after that is the same for NVIDIA and AMD.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_NVIDIA_LABEL = re.compile(r"^\s*(\.L\w+):")
_NVIDIA_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+\{?\s*(?:@(\S+)\s+)?(\S+)\s*(.*?)\s*\}?\s*;")
_NVIDIA_TARGET = re.compile(r"`\((\.L\w+)\)")
_NVIDIA_CONDITION = re.compile(r"!?U?P\d")
_AMD_LABEL = re.compile(r"^(\.?L\w+):")
_AMD_INSTRUCTION = re.compile(r"^\s+([a-z]\w*)\s*(.*)")

_RETRY_LENGTH = 16


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        place: its address (NVIDIA) or line (AMD) in the listing.
        opcode: with all its suffixes.
        operands: the rest of the text.
        target: label that it may jump to; None for none.
        falls: whether the next instruction may be executed after it.
        guard: whether a predicate may turn it off (NVIDIA).
    """

    place: str
    opcode: str
    operands: str = ""
    target: str | None = None
    falls: bool = True
    guard: bool = False


@dataclass(frozen=True)
class Listing:
    """Instructions in the order of the text, and for each label the index of the instruction that it stands before."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class Trip:
    """One trip through a loop.

    Args:
        head: place of the loop's first instruction.
        light: instructions of the shortest path from the head back to it, among those with the most matrix products.
        heavy: of the longest one.
        body: every instruction of the loop, on whatever path.
    """

    head: str
    light: tuple[Instruction, ...]
    heavy: tuple[Instruction, ...]
    body: tuple[Instruction, ...]


def parse_nvidia(text: str) -> Listing:
    """The first kernel of what `nvdisasm -c` prints.

    Example:
        >>> code = parse_nvidia(".L_x_0: \\n /*0000*/ MUFU.EX2 R0, R1 ;\\n /*0010*/ @P0 BRA `(.L_x_0) ;")
        >>> code.labels, code.instructions[1].target, code.instructions[1].falls
        ({'.L_x_0': 0}, '.L_x_0', True)
    """
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if line.lstrip().startswith(".section") and found:
            break
        if label := _NVIDIA_LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _NVIDIA_INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            target, falls = _nvidia_flow(guard, opcode, operands)
            guarded = guard not in (None, "PT")
            found.append(Instruction(hex(int(address, 16)), opcode, operands, target, falls, guarded))
    return Listing(tuple(found), labels)


def _nvidia_flow(guard: str | None, opcode: str, operands: str) -> tuple[str | None, bool]:
    """(target, falls). A call of a label of the same kernel is a jump that ptxas wrote in another way; the repair of
    divergent warps (BRA.DIV) is left out, for it never runs in code whose warps stay together."""
    base, conditional = opcode.split(".")[0], guard not in (None, "PT")
    if base in ("EXIT", "RET", "WARPEXIT", "BRX", "JMX"):
        return None, conditional
    if base not in ("BRA", "JMP", "CALL") or ".DIV" in opcode:
        return None, True
    label = _NVIDIA_TARGET.search(operands)
    falls = conditional or base == "CALL" or _NVIDIA_CONDITION.match(operands) is not None
    return (label[1] if label else None), falls


def parse_amd(text: str) -> Listing:
    """The first kernel of LLVM's assembly for AMD.

    Example:
        >>> code = parse_amd(".LBB0_1:\\n\\tv_exp_f32_e32 v0, v1\\n\\ts_cbranch_scc1 .LBB0_1 ; back\\n\\ts_endpgm\\n")
        >>> [(i.opcode, i.target, i.falls) for i in code.instructions[1:]]
        [('s_cbranch_scc1', '.LBB0_1', True), ('s_endpgm', None, False)]
    """
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        code = line.split(";")[0].rstrip()
        if code.startswith(".Lfunc_end"):
            break
        if label := _AMD_LABEL.match(code):
            labels[label[1]] = len(found)
        elif match := _AMD_INSTRUCTION.match(code):
            target, falls = _amd_flow(match[1], match[2])
            found.append(Instruction(f"line {number}", match[1], match[2], target, falls))
    return Listing(tuple(found), labels)


def _amd_flow(opcode: str, operands: str) -> tuple[str | None, bool]:
    """(target, falls). A jump over code for which no lane is live (execz) is left out: a live lane runs the code."""
    if opcode in ("s_endpgm", "s_setpc_b64"):
        return None, False
    if opcode.startswith(("s_branch", "s_cbranch")) and opcode != "s_cbranch_execz":
        return operands.split()[0], opcode != "s_branch"
    return None, True


def split(listing: Listing) -> list[range]:
    """Basic blocks, as ranges of instruction indices."""
    code, starts = listing.instructions, {0}
    for i, instruction in enumerate(code):
        if instruction.target is not None or not instruction.falls:
            starts.add(i + 1)
            starts.add(listing.labels.get(instruction.target or "", 0))
    edges = [*sorted(s for s in starts if s < len(code)), len(code)]
    return [range(a, b) for a, b in pairwise(edges)]


def successors(listing: Listing, blocks: Sequence[range]) -> list[list[int]]:
    """For each block, the blocks that may follow it."""
    index = {block.start: number for number, block in enumerate(blocks)}
    follow: list[list[int]] = []
    for block in blocks:
        last = listing.instructions[block[-1]]
        ends = [listing.labels.get(last.target or "", -1)] + [block.stop] * last.falls
        follow.append([index[end] for end in ends if end in index])
    return follow


def visit(follow: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Depth-first visit: each block's rank (before its successors, loops apart), and the edges that close loops.

    Starts from the entry, then from blocks that nothing reaches: targets of indirect jumps.
    """
    entered = {v for after in follow for v in after}
    roots = [0, *(b for b in range(len(follow)) if b not in entered), *range(len(follow))]
    finished: list[int] = []
    open_, seen, closing = set[int](), set[int](), []
    for root in roots:
        stack = [] if root in seen else [(root, iter(follow[root]))]
        seen.add(root)
        open_.update(block for block, _ in stack)
        while stack:
            block, rest = stack[-1]
            after = next(rest, None)
            if after is None:
                stack.pop()
                open_.discard(block)
                finished.append(block)
            elif after in open_:
                closing.append((block, after))
            elif after not in seen:
                seen.add(after)
                open_.add(after)
                stack.append((after, iter(follow[after])))
    rank = [0] * len(follow)
    for position, block in enumerate(reversed(finished)):
        rank[block] = position
    return rank, closing


def _reach(start: Collection[int], edges: Sequence[Collection[int]], within: Collection[int]) -> set[int]:
    """Blocks of `within` reached from `start` along `edges`."""
    reached, stack = set(start), list(start)
    while stack:
        fresh = [b for b in edges[stack.pop()] if b in within and b not in reached]
        reached.update(fresh)
        stack.extend(fresh)
    return reached


def natural_loops(follow: Sequence[Sequence[int]], closing: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Blocks of each loop by its head: on a way from the head to an edge that closes the loop."""
    before: list[set[int]] = [set() for _ in follow]
    for block, after in enumerate(follow):
        for b in after:
            before[b].add(block)
    loops = {}
    for head in sorted({head for _, head in closing}):
        latches, others = {b for b, h in closing if h == head}, set(range(len(follow))) - {head}
        behind = _reach(latches - {head}, before, others) | {head}
        loops[head] = frozenset(_reach([head], follow, behind))
    return loops


def longest(
    head: int,
    body: Collection[int],
    follow: Sequence[Sequence[int]],
    rank: Sequence[int],
    value: Callable[[int], tuple[int, int]],
) -> list[int]:
    """The path of greatest summed value from the head to an edge back to it, loops inside taken once."""
    best, previous = {head: value(head)}, {head: head}
    for block in sorted(body, key=rank.__getitem__):
        for after in follow[block] if block in best else ():
            if after in body and rank[after] > rank[block]:
                step = value(after)
                total = (best[block][0] + step[0], best[block][1] + step[1])
                if after not in best or total > best[after]:
                    best[after], previous[after] = total, block
    path = [max((b for b in best if head in follow[b]), key=best.__getitem__, default=head)]
    while path[-1] != head:
        path.append(previous[path[-1]])
    return path[::-1]


def main_loops(
    listing: Listing,
    product: Callable[[str], bool],
    exponential: Callable[[str], bool],
    wait: Callable[[str], bool],
) -> tuple[Trip, ...]:
    """Innermost loops that do the work, in the order of the text.

    Args:
        listing: the kernel.
        product: whether an opcode is a matrix product.
        exponential: whether an opcode is an exponential. A loop with more than four counts as work too: without matrix
            instructions (fp32 in IEEE arithmetic) and in warps that do only the softmax there is no product to see.
        wait: whether an opcode polls a barrier. A short loop around one is not part of a trip: it is run only to wait.

    Returns:
        One Trip for each loop.
    """
    code, blocks = listing.instructions, split(listing)
    follow = successors(listing, blocks)
    rank, closing = visit(follow)
    loops = natural_loops(follow, closing)

    def count(which: Callable[[str], bool], some: Collection[int]) -> int:
        return sum(which(code[i].opcode) for b in some for i in blocks[b])

    sizes = {head: sum(len(blocks[b]) for b in body) for head, body in loops.items()}
    hot = {head: body for head, body in loops.items() if count(product, body) or count(exponential, body) > 4}
    short = [body for head, body in loops.items() if head not in hot and sizes[head] <= _RETRY_LENGTH]
    cold = frozenset().union(*(body for body in short if count(wait, body)))
    inner = {head: body for head, body in hot.items() if not any(other < body for other in hot.values())}

    def trip(head: int, body: frozenset[int]) -> Trip:
        def gather(path: Collection[int]) -> tuple[Instruction, ...]:
            return tuple(code[i] for b in path if b not in cold for i in blocks[b])

        def path(sign: int) -> list[int]:
            def value(b: int) -> tuple[int, int]:
                return count(product, [b]), sign * len(blocks[b]) * (b not in cold)

            return longest(head, body, follow, rank, value)

        return Trip(code[blocks[head].start].place, gather(path(-1)), gather(path(1)), gather(sorted(body)))

    return tuple(trip(head, body) for head, body in sorted(inner.items()))
