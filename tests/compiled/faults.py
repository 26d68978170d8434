"""What the emulator refuses, and what it finds wrong with a kernel."""


class Fault(Exception):
    """A program did what no program may do."""


class Unsupported(Fault):
    """An instruction, or a form of one, that the emulator does not know."""


class Divergence(Fault):
    """Threads of a CTA part where they must stay together: at a branch, a barrier or a matrix product."""


class MemoryFault(Fault):
    """An access outside the declared tensors or shared memory, a misaligned one, a read of what was never written."""


class Race(Fault):
    """An access whose result depends on which of two warps, copies or CTAs comes first."""
