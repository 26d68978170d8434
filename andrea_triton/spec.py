"""What kind of attention a call asks for: keywords in, one frozen and canonical AttentionSpec out. No tensors here."""

import copy
import importlib
import math
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from andrea_triton.errors import DTypeError, ShapeError

MAX_LENGTH = 2**28

Window = int | tuple[int | None, int | None] | None


class Score(NamedTuple):
    """A user's change to the scores, after scale and softcap, before ALiBi, bias and the masks. It can be copied, and pickled
    where its functions stand at the top level of a module.

    Args:
        fn: jit function `fn(score, batch, head, q_pos, k_pos, *args) -> score`.
        grad: the derivative of fn by score: a jit function `grad(score, batch, head, q_pos, k_pos, *args)`, or 1 where fn only
            adds to the score. With None the gradients come from torch_fn by autograd, on every backend, block by block and
            slower than by the kernels; without torch_fn too, asking for a gradient is an error.
        args: tensors and numbers handed to every function; a jit function gets the address of a tensor's first element. They
            get no gradient.
        torch_fn: fn again on dense torch tensors that broadcast to (B, HQ, M, N), for the backends without kernels.

    Example:
        >>> Score(fn=None, torch_fn=lambda score, batch, head, q_pos, k_pos: score - (q_pos - k_pos).abs()).args
        ()
    """

    fn: Any
    grad: Any = None
    args: tuple[Any, ...] = ()
    torch_fn: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Score":
        """Functions are shared, arguments are copied."""
        return self._replace(args=copy.deepcopy(self.args, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions are pickled by name."""
        return _restored, (Score, *[_named_function(x) if callable(x) else x for x in self])


class Mask(NamedTuple):
    """A user's own mask: True where the query may see the key. It can be copied, and pickled where its functions stand at the top
    level of a module.

    Args:
        fn: jit function `fn(batch, head, q_pos, k_pos, *args) -> bool`.
        args: tensors and numbers handed to every function.
        torch_fn: fn again on dense torch tensors that broadcast to (B, HQ, M, N), for the backends without kernels.

    Example:
        >>> Mask(fn=None, args=(4,), torch_fn=lambda b, h, q_pos, k_pos, size: q_pos // size == k_pos // size).args
        (4,)
    """

    fn: Any
    args: tuple[Any, ...] = ()
    torch_fn: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mask":
        """Functions are shared, arguments are copied."""
        return self._replace(args=copy.deepcopy(self.args, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions are pickled by name."""
        return _restored, (Mask, *[_named_function(x) if callable(x) else x for x in self])


class _Named(NamedTuple):
    """A function at the top level of a module, jit or not, as it is pickled: jit functions hold locks, which cannot be."""

    module: str
    name: str


def _named_function(function: Any) -> _Named:
    """The name that leads to a function from any process.

    Raises:
        PicklingError: there is none.
    """
    inner = getattr(function, "fn", function)  # what a jit function was made from
    named = _Named(getattr(inner, "__module__", ""), getattr(inner, "__qualname__", repr(inner)))
    if getattr(sys.modules.get(named.module), named.name, None) is not function:
        wanted = "wanted a function at the top level of a module, by whose name another process finds it; define it there"
        raise pickle.PicklingError(f"{named.name} of {named.module} cannot be pickled; {wanted}")
    return named


def _restored(kind: Any, *fields: Any) -> Any:
    """A pickled Score or Mask."""
    return kind(*[getattr(importlib.import_module(x.module), x.name) if isinstance(x, _Named) else x for x in fields])


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of one attention call, canonical: two calls that mean the same have equal specs.

    A query at position q sees the keys at positions k in [q - left, q + right]; a side that is None is open.

    Args:
        left: keys seen before the query's position, or None.
        right: keys seen after the query's position, or None; causal is 0.
        q_start: position of query 0, key 0 being at 0; None means N - M, so that the last query meets the last key.
        scale: factor of q·k; None means 1/sqrt(D).
        softcap: bound c of c·tanh(score / c); None means none.
        dropout_p: probability that a weight is dropped, in [0, 1).
        precise: take the row sum from the probabilities as rounded for the second product; in fp32, products are IEEE's.
    """

    left: int | None = None
    right: int | None = None
    q_start: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    precise: bool = False


def make_spec(
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    q_start: int | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    precise: bool = False,
) -> AttentionSpec:
    """Check the keywords of a call and bring them to their canonical form.

    Args:
        causal: no key after the query's position.
        scale: finite number, zero and negative too; None means 1/sqrt(D).
        window: W >= 1 keys, the query's own position included, or (left, right) distances >= 0, None for an open side.
        q_start: position of query 0, at most 2**28 in size; None means N - M.
        softcap: finite number > 0, or None.
        dropout_p: 0 <= dropout_p < 1.
        precise: take the row sum from the rounded probabilities.

    Returns:
        The AttentionSpec.

    Raises:
        ShapeError: a value is out of range.
        DTypeError: an argument has the wrong type.

    Example:
        >>> make_spec(causal=True, window=4).left
        3
        >>> make_spec(window=(None, 2)).right
        2
    """
    _check_flag("causal", causal)
    _check_flag("precise", precise)
    left, right = _window_distances(window, causal)
    if causal:
        right = 0
    if q_start is not None:
        _check_integer("q_start", q_start, "None for N - M, which lets the last query see the last key")
        if not -MAX_LENGTH <= q_start <= MAX_LENGTH:
            raise ShapeError(f"q_start is {q_start}; wanted a position in [-2**28, 2**28]; pass None for N - M")
    if scale is not None:
        scale = _real("scale", scale)
        if not _finite_float32(scale):
            raise ShapeError(f"scale is {scale}; wanted a finite float32 number; pass None for 1/sqrt(D)")
    if softcap is not None:
        softcap = _real("softcap", softcap)
        if not (_finite_float32(softcap) and softcap >= 1.1754943508222875e-38):
            raise ShapeError(f"softcap is {softcap}; wanted a finite float32 number above 0; pass None for no cap")
    dropout_p = _real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ShapeError(f"dropout_p is {dropout_p}; wanted 0 <= dropout_p < 1; pass 0.0 for no dropout")
    return AttentionSpec(left, right, q_start, scale, softcap, dropout_p, precise)


def default_scale(head_dim: int) -> float:
    """The scale of a call that names none: 1/sqrt(D).

    Args:
        head_dim: D, the number of features of a query; without any q·k is 0, whatever its factor.

    Returns:
        The factor of q·k.

    Source:
        arXiv 1706.03762, section 3.2.1.

    Example:
        >>> default_scale(64)
        0.125
    """
    return 1.0 / math.sqrt(max(head_dim, 1))


def _finite_float32(value: float) -> bool:
    """Whether a number is finite in float32. The bounds are written out: torch.compile makes numbers of floats that stand at the
    top level of a module, and loses them between the subgraphs of two checkpointed calls."""
    return -3.4028234663852886e38 <= value <= 3.4028234663852886e38


def _window_distances(window: Window, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) distances of a window as the caller wrote it."""
    if window is None:
        return None, None
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ShapeError(
                f"window is {window}; wanted at least 1 key, the query's own position included; pass None for no window"
            )
        return window - 1, 0 if causal else window - 1
    if not isinstance(window, (tuple, list)):
        raise DTypeError(
            f"window is {_named(window)}; wanted an int or a pair (left, right) of distances; pass None for no window"
        )
    if len(window) != 2:
        raise ShapeError(f"window has {len(window)} entries; wanted (left, right); write None for an open side")
    left, right = window
    _check_distance("window[0] (left)", left)
    _check_distance("window[1] (right)", right)
    return left, right


def _check_distance(name: str, value: int | None) -> None:
    """Fail unless value is None or an int >= 0."""
    if value is None:
        return
    _check_integer(name, value, "None for an open side")
    if value < 0:
        raise ShapeError(f"{name} is {value}; wanted a distance of at least 0; write None for an open side")


def _check_integer(name: str, value: object, default: str) -> None:
    """Fail unless value is an int and not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DTypeError(f"{name} is {_named(value)}; wanted an int; pass int({name}), or {default}")


def _check_flag(name: str, value: object) -> None:
    """Fail unless value is a bool."""
    if not isinstance(value, bool):
        raise DTypeError(f"{name} is {_named(value)}; wanted True or False; pass bool({name})")


def _real(name: str, value: object) -> float:
    """Value as a float; fail unless it is a real Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        way_out = f"pass float({name})"
        if name == "scale":
            way_out = "multiply q by it and pass scale=1.0, which keeps its gradient; float(scale) of one that needs none"
        raise DTypeError(f"{name} is {_named(value)}; wanted a Python number; {way_out}")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if isinstance(value, int) and value < 0 else math.inf


def _named(value: object) -> str:
    """A short name of a value of the wrong type, for messages."""
    return f"{value!r} ({type(value).__name__})" if isinstance(value, (bool, int, float, str)) else type(value).__name__
