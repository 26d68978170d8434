"""The course that a warp runs through a kernel: what lies before each main loop, one trip of it, and so on to the end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from andrea_triton.counting import opcodes
from andrea_triton.counting.assembly import Listing, longest, natural_loops, split, successors, visit
from andrea_triton.counting.steps import Step

_LOADS = ("LDGSTS", "LDG", "UTMALDG")
_RETRY = 16  # instructions of a loop that only polls a barrier
_EXPONENTIALS = 4  # more of them are work, also where there is no product
_AROUND = 10000  # what a way around a load costs


class Course(NamedTuple):
    """Segments of instruction indices: before the first loop, a trip of it, before the second, and so on; an odd number.

    Args:
        segments: the indices.
        joined: one loop does full blocks and edges, and lies here twice: the trip over a full block and, with the mask, the trip
            over an edge, edges where they come in the loop's order.
    """

    segments: tuple[tuple[int, ...], ...]
    joined: bool = False


class Graph:
    """A kernel's basic blocks and its main loops."""

    def __init__(self, listing: Listing) -> None:
        self.code, self.blocks = listing.instructions, split(listing)
        self.follow = successors(listing, self.blocks)
        self.rank, closing = visit(self.follow)
        loops = natural_loops(self.follow, closing)
        hot = {head: body for head, body in loops.items() if self._works(body)}
        self.cold = frozenset().union(*(body for head, body in loops.items() if head not in hot and self._retries(body)))
        self.loops = sorted((h, b) for h, b in hot.items() if not any(other < b for other in hot.values()))

    def count(self, which: Callable[[str], bool], some: Collection[int]) -> int:
        """Instructions of some blocks for which `which` holds."""
        return sum(which(self.code[i].opcode) for b in some for i in self.blocks[b])

    def loads(self, block: int) -> bool:
        """Whether a block loads from global memory."""
        return any(opcodes.base(self.code[i].opcode) in _LOADS for i in self.blocks[block])

    def _works(self, body: Collection[int]) -> bool:
        return bool(self.count(opcodes.is_product, body)) or self.count(opcodes.is_exponential, body) > _EXPONENTIALS

    def _retries(self, body: Collection[int]) -> bool:
        return sum(len(self.blocks[b]) for b in body) <= _RETRY and bool(self.count(opcodes.is_wait, body))

    def trip(self, head: int, body: frozenset[int], heavy: bool) -> list[int]:
        """Blocks of one trip: the shortest, with all its loads, or the longest."""

        def value(b: int) -> tuple[int, int]:
            size = 0 if b in self.cold and b != head else len(self.blocks[b])
            return self.count(opcodes.is_product, [b]), size if heavy else size + 1 if self.loads(b) else -size

        return longest(head, body, self.follow, self.rank, value)

    def shortest(self, starts: Collection[int], goal: Callable[[int], bool], banned: Collection[int]) -> list[int]:
        """Blocks of the shortest way to a block that is the goal, but around no load."""
        best = {b: len(self.blocks[b]) for b in starts}
        queue, before = [(cost, b) for b, cost in best.items()], dict[int, int]()
        heapq.heapify(queue)
        while queue:
            cost, block = heapq.heappop(queue)
            if cost > best[block]:
                continue
            if goal(block):
                way = [block]
                while way[-1] in before:
                    way.append(before[way[-1]])
                return way[::-1]
            after = [b for b in self.follow[block] if b not in banned]
            for b in after:
                around = any(w != b and self.loads(w) and b in self.follow[w] for w in self.follow[block])
                total = cost + len(self.blocks[b]) + _AROUND * around
                if total < best.get(b, total + 1):
                    best[b], before[b] = total, block
                    heapq.heappush(queue, (total, b))
        return []

    def ends(self, block: int) -> bool:
        """Whether the program ends with a block."""
        return opcodes.base(self.code[self.blocks[block][-1]].opcode) == "EXIT"


def course(listing: Listing, edges: str = "") -> Course:
    """The course through a kernel: the shortest, with all loads.

    Args:
        listing: the kernel.
        edges: "first" or "last" where one loop does full blocks and edges, by where the edges come; "" for a loop each.
    """
    graph = Graph(listing)
    bodies: frozenset[int] = frozenset().union(*(body for _, body in graph.loops))
    parts: list[list[int]] = []
    at, done = [0], frozenset[int]()
    for head, body in graph.loops:
        parts.append(graph.shortest(at, head.__eq__, (bodies - body) | done)[:-1])
        parts.append(graph.trip(head, body, False))
        at, done = [b for a in body for b in graph.follow[a] if b not in body], done | body
    parts.append(graph.shortest(at, graph.ends, done))
    joined = bool(edges) and len(graph.loops) == 1
    if joined:
        head, body = graph.loops[0]
        full, edge = parts[1], [b for b in graph.trip(head, body, True) if b not in graph.cold or b == head]
        parts = [parts[0], *((edge, [], full) if edges == "first" else (full, [], edge)), parts[2]]
    return Course(tuple(tuple(i for b in part for i in graph.blocks[b]) for part in parts), joined)


def ahead(route: Course, steps: Sequence[Step]) -> tuple[list[int], list[bool]]:
    """For every place of the course: how many trips a load runs ahead of its loop, and whether a bulk copy is of the program's
    own tile, that no trip repeats. A pipelined loop loads for later trips: its last loads are off, and those of the first fill
    where the loop has fewer trips. Without this, loads left over would feed the waits of the next loop."""
    segments = route.segments
    trips, own = [[0] * len(s) for s in segments], [[False] * len(s) for s in segments]
    for k in range(1, len(segments), 2):
        for kind, group in (("bulk", "bulk"), ("copy", "commit")):
            gap, loop = [steps[i].unit for i in segments[k - 1]], [steps[i].unit for i in segments[k]]
            each, start = loop.count(group), 0
            if kind == "bulk":
                start = max([n + 1 for n, unit in enumerate(gap) if unit == "poll"], default=0)
                mine = [n for n, unit in enumerate(gap) if unit == "bulk" and n >= start]
                if each and len(mine) % each:  # what the loop does not repeat comes first
                    start = mine[len(mine) % each]
                own[k - 1] = [own[k - 1][n] or (unit == "bulk" and n < start) for n, unit in enumerate(gap)]
            fill = gap[start:].count(group)
            if not each or not fill:
                continue
            seen = 0
            for n in range(start, len(gap)):
                if gap[n] == kind:
                    trips[k - 1][n] = seen // each + 1
                seen += gap[n] == group
            trips[k] = [max(1, fill // each) if unit == kind else trips[k][n] for n, unit in enumerate(loop)]
    if route.joined:  # both kinds of trip load equally far ahead
        most = max(trips[1], default=0)
        trips[3] = [most if steps[i].unit in ("bulk", "copy") else 0 for i in segments[3]]
    return [n for part in trips for n in part], [x for part in own for x in part]
