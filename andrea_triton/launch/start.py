"""A kernel start, ready but for the addresses of its tensors: what a Launch becomes on a device, once for many calls."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from andrea_triton import target as targets
from andrea_triton.errors import FitError
from andrea_triton.launch import compile as compiler
from andrea_triton.launch.descriptors import Box, box_of, take_over, tensor_map
from andrea_triton.launch.faults import explained
from andrea_triton.launch.plan import Launch, tiled
from andrea_triton.problem import Problem

_kernels: dict[Any, Any] = {}


class Short(NamedTuple):
    """The C function in which Triton's launcher ends, with what the launcher hands to it between the stream and the kernel's own
    arguments where no hooks are set. To find it anew at every start takes as long as the start.

    Args:
        function: takes grid, stream, between, and the arguments: one after the other (spread), or as one tuple.
        between: the same at every start.
        spread: how the arguments come.
    """

    function: Callable[..., Any]
    between: tuple[Any, ...]
    spread: bool


class Start(NamedTuple):
    """One kernel start. Its arguments are `pick(addresses + maps + numbers)`, addresses being those of a call's tensors in their
    order, maps those of its descriptors.

    Args:
        kernel: compiled, and loaded on the device.
        short: the way to start it.
        grid: programs along each axis.
        pick: brings addresses and numbers in the order of the kernel's parameters.
        numbers: the arguments that are the same in every such call.
        lasting: whether it holds for other tensors, or for these alone.
        boxes: the arguments that are descriptors of tensors.
    """

    kernel: Any
    short: Short | None
    grid: tuple[int, int, int]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    numbers: tuple[Any, ...]
    lasting: bool
    boxes: tuple[Box, ...] = ()


def short(kernel: Any) -> Short | None:
    """The Short of a loaded kernel, found by letting its launcher show what it would hand on. None where there is more to a start
    than handing on: scratch memory to allocate, or a launcher of another build."""
    launcher = kernel.run
    scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if scratch != [0, 0] or not hasattr(launcher, "launch"):
        return None
    shown: list[tuple[Any, ...]] = []
    showing, mark = copy.copy(launcher), object()
    showing.launch = lambda *args: shown.append(args)
    showing(1, 2, 3, 4, kernel.function, kernel.packed_metadata, None, None, None, mark)
    (start,) = shown
    if start[:4] != (1, 2, 3, 4) or start[-1] not in (mark, (mark,)):
        return None
    return Short(launcher.launch, start[4:-1], start[-1] is mark)


def ready(launch: Launch, problem: Problem, places: Mapping[int, int]) -> Start:
    """The Start of a Launch on the current device, with the first of its tilings that fits there.

    Args:
        launch: what to start.
        problem: the call that it is of.
        places: of each tensor of the call, by its id, the place of its address among the addresses.
    """
    key = (launch.kernel, *launch.constexprs.values(), launch.configs, problem.device, compiler.describe(launch.args))
    if key not in _kernels:
        with compiler.language:  # of threads that want the same kernel one compiles it, and warns
            if key not in _kernels:
                _kernels[key] = _first_that_fits(launch, problem)
    config, kernel, way, hows = _kernels[key]
    chosen = launch if config == launch.config else tiled(launch, problem, config)
    order: list[int] = []
    numbers: list[Any] = []
    boxes: list[Box] = []

    def number(value: Any) -> None:
        order.append(len(places) + len(hows) + len(numbers))
        numbers.append(_plain(value))

    for value in compiler.flatten(chosen.args):
        if isinstance(value, TensorDescriptor):
            order.append(len(places) + len(boxes))
            boxes.append(box_of(value, places[id(value.base)], hows[len(boxes)]))
            for size in (*value.shape, *value.strides):
                number(size)
        elif id(value) in places:
            order.append(places[id(value)])
        else:
            number(value)
    lasting = all(type(x) in (int, float) for x in numbers)
    return Start(kernel, way, (*chosen.grid, 1), operator.itemgetter(*order), tuple(numbers), lasting, tuple(boxes))


def _plain(value: Any) -> Any:
    """A number as Python's own, which the launcher reads fastest; what is no number stays."""
    return int(value) if isinstance(value, (int, np.int64)) else float(value) if isinstance(value, float) else value


def go(starts: Sequence[Start], addresses: tuple[int, ...], problem: Problem) -> None:
    """Start kernels, in order, on the current stream of the tensors' device.

    Raises:
        UnsupportedError: the installed Triton's launcher is not one that this works with.
    """
    try:
        with targets.current(problem.device):
            stream, (enter, leave) = targets.stream(problem.device), _hooks()
            watched = enter is not None or leave is not None
            for kernel, way, grid, pick, numbers, _, boxes in starts:
                if boxes:
                    arguments = pick((*addresses, *[tensor_map(box, addresses[box.place]) for box in boxes], *numbers))
                else:
                    arguments = pick(addresses + numbers)
                if way is None or watched:
                    metadata = kernel.launch_metadata(grid, stream, *arguments) if watched else None
                    kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)
                    continue
                function, between, spread = way
                if spread:
                    function(*grid, stream, *between, *arguments)
                else:
                    function(*grid, stream, *between, arguments)
    except (AttributeError, TypeError) as error:
        targets.blame_triton(error)
        raise


def _hooks() -> tuple[Any, Any]:
    """What Triton's user wants called around every start: None for a chain of nothing, which would cost a call."""
    settings = triton.knobs.runtime
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    return enter if getattr(enter, "calls", enter) else None, leave if getattr(leave, "calls", leave) else None


def _first_that_fits(launch: Launch, problem: Problem) -> tuple[Any, Any, Short | None, list[Any]]:
    with explained(f"{launch.name} cannot be started on {problem.device}"):
        target, reason = targets.gpu_target(), ""
    for config in launch.configs:
        kernel = compiler.compiled(tiled(launch, problem, config), target)
        try:
            with explained(f"{launch.name} cannot be loaded on {target.arch}"):
                hows = take_over(kernel)
                kernel._init_handles()
        except triton.runtime.errors.OutOfResources as error:
            reason = reason or str(error)
            continue
        if reason:
            found = f"{launch.name}: {launch.config} does not fit this card ({reason}); it runs with {config}, more slowly"
            warnings.warn(found, RuntimeWarning, stacklevel=2)
        return config, kernel, short(kernel), hows
    raise FitError(
        f"no tiling of {launch.name} fits {target.arch} for head dims {problem.D}, {problem.DV} ({reason}); use backend='torch'"
    )
