"""A call as the emulator ran it, to be run again from any of its kernels on: with another text, or another source.

Only the kernels from there on run, and the first result that is wrong ends it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from andrea_triton.launch.configs import Config
from andrea_triton.launch.plan import Launch
from andrea_triton.testing import Case, assert_accurate, attend_reference, cast, make_inputs, run
from tests.compiled import calls
from tests.compiled.emulated import Rewrite, emulated, start
from tests.compiled.faults import Fault, Unsupported

FILLS = {"forward": ("out", "lse"), "dkdv": ("dk", "dv"), "dq": ("dq",), "dsinks": ("dsinks",)}
"""The results that are there after a kernel has run."""


class Taken(NamedTuple):
    """A launch; what its plan writes, and copies of that from before and after the launch."""

    launch: Launch
    written: tuple[Tensor, ...]
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...] = ()


class Recording(NamedTuple):
    """A call that went well: its launches for a target in the order in which they ran, PTX by the kernel's name, and a function
    that raises AssertionError when what a kernel of a name has just filled is wrong."""

    target: str
    launches: list[Taken]
    texts: dict[str, str]
    judge: Callable[[str], None]

    def begun(self, launch: Launch, written: tuple[Tensor, ...]) -> None:
        """Keep a launch that is about to run."""
        self.launches.append(Taken(launch, written, tuple(x.clone() for x in written)))

    def compiled(self, name: str, text: str) -> str:
        """Keep a text."""
        return self.texts.setdefault(name, text)


def no_judge(name: str) -> None:
    """Nothing is wrong."""


@functools.cache
def attention(case: Case, target: str, tiles: tuple[tuple[str, Config], ...]) -> Recording:
    """A case in fp16, forward and backward, with tilings by the kernel's name."""
    inputs = make_inputs(case, torch.float16)
    first = Recording(target, [], {}, no_judge)
    with emulated(target, tiles=dict(tiles), rewrite=first.compiled, begun=first.begun):
        got = run(inputs, calls.attend)
    eager, exact = run(inputs, attend_reference), run(cast(inputs, torch.float64), attend_reference)

    def judge(name: str) -> None:
        for field in FILLS.get(name, ()):
            one, two, three = (getattr(results, field) for results in (got, eager, exact))
            assert_accurate(one, two, three, one.dtype, f"{case.name}: {field}")

    return sound(first._replace(judge=judge))


@functools.cache
def decoding(target: str) -> Recording:
    """A decoding step in fp16, its keys in pages."""
    first = Recording(target, [], {}, no_judge)
    with emulated(target, rewrite=first.compiled, begun=first.begun):
        correct = calls.decode(torch.float16, True)
    return sound(first._replace(judge=lambda name: correct() if name == "combine" else None))


def sound(recording: Recording) -> Recording:
    """The recording, after a replay that has to go well and to be able to go wrong."""
    name, launches = recording.launches[0].launch.name, recording.launches
    for i, (taken, following) in enumerate(zip(launches, [*launches[1:], None], strict=True)):
        more = following is not None and following.written is taken.written
        launches[i] = taken._replace(after=following.before if more else tuple(x.clone() for x in taken.written))
    assert not finding(recording, name)
    for taken in launches:
        for x in taken.written:
            x.fill_(torch.nan)
    assert any(_judged(recording, taken.launch.name) for taken in launches), "results are copies of what kernels wrote"
    return recording


def finding(recording: Recording, first: str, rewrite: Rewrite | None = None) -> str:
    """Run a call again from a kernel on: what gives a bug away, nothing for one that gets through. With another text for the
    first kernel alone, the call ends where that leaves every bit as it was: what follows would read the same.

    Raises:
        Unsupported: a text holds what the emulator does not know.
    """
    start_at = [taken.launch.name for taken in recording.launches].index(first)
    for taken in recording.launches[:start_at]:  # which an earlier replay may have left wrong, or nobody has filled again
        for x, copy in zip(taken.written, taken.after, strict=True):
            x.copy_(copy)
    restored: tuple[Tensor, ...] | None = None
    for launch, written, before, after in recording.launches[start_at:]:
        if written is not restored:
            for x, copy in zip(written, before, strict=True):
                x.copy_(copy)
            restored = written
        try:
            start(launch, recording.target, rewrite)
        except Unsupported:
            raise
        except Fault as fault:
            return f"{type(fault).__name__}: {fault}"
        if wrong := _judged(recording, launch.name):
            return wrong
        if rewrite is not None and all(map(_same, written, after)):
            return ""
    return ""


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether every bit is the same."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def _judged(recording: Recording, name: str) -> str:
    try:
        recording.judge(name)
    except AssertionError as error:
        return str(error)
    return ""
