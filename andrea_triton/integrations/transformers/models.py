"""Which models of transformers can have this attention: read from their code, as no flag of theirs says it."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedError

NAME = "andrea_triton"
CONTINUOUS = "andrea_triton_flash"  # continuous batching takes names with "flash" in them


def refuse_unfit_models(base: Any) -> None:
    """Let every model that is asked to take NAME be checked by `require_fit`.

    Args:
        base: transformers' PreTrainedModel.
    """
    chosen = base.get_correct_attn_implementation
    if hasattr(chosen, "refuses_unfit_models"):
        return

    @functools.wraps(chosen)
    def checked(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        implementation: str = chosen(self, requested_attention, is_init_check)
        if implementation in (NAME, CONTINUOUS):
            require_fit(type(self), self.config)
        return implementation

    checked.refuses_unfit_models = True  # type: ignore[attr-defined]
    base.get_correct_attn_implementation = checked


def allow_continuous(base: Any) -> None:
    """Let every model take CONTINUOUS as it takes NAME: what transformers does beside that for names with "flash" in them is to
    look for a package or a repository of that name.

    Args:
        base: transformers' PreTrainedModel.
    """
    adjust = base._check_and_adjust_attn_implementation
    if hasattr(adjust, "allows_continuous"):
        return

    @functools.wraps(adjust)
    def checked(self: Any, attn_implementation: str | None, is_init_check: bool = False, **others: Any) -> str:
        if attn_implementation == CONTINUOUS:
            taken: str = self.get_correct_attn_implementation(attn_implementation, is_init_check)
            return taken
        adjusted: str = adjust(self, attn_implementation, is_init_check, **others)
        return adjusted

    checked.allows_continuous = True  # type: ignore[attr-defined]
    base._check_and_adjust_attn_implementation = checked


def require_fit(model: type, config: Any) -> None:
    """Refuse a model whose attention would not come here. A part of a larger model (its audio tower, say) keeps what it makes.

    Args:
        model: its class.
        config: its config.

    Raises:
        UnsupportedError: naming what the model does, and the attn_implementation to use.
    """
    asked = f"attn_implementation={NAME!r} of {model.__name__}"
    if getattr(config, "output_attentions", False):
        raise UnsupportedError(asked, NAME, "config.output_attentions is set, and the weights are never made; use 'eager'")
    parts = [part for part in _parts(model) if "attention" in part.__name__.lower() or "attn" in part.__name__.lower()]
    tables = [read.tables for read in map(_read, _parts(model)) if read.tables]
    own = [part.__name__ for part in parts if not _read(part).interface]
    vouched = _supports_any(model) or getattr(model, "_supports_attention_backend", False)
    inner = bool(getattr(config, "base_config_key", ""))  # one part of a larger model: as it makes its own, with eager's masks
    if tables:
        what, other = "it picks its attention by name from a table of its own", _first_of(model, tables[0])
    elif own and not vouched and not inner and not any(_read(part).interface for part in _parts(model)):
        what, other = f"its {own[0]} makes the attention by itself and never calls a registered one", "eager"
    else:
        return
    way = f"use attn_implementation={other!r}, or where it is one part of a model, that for its sub-config alone: "
    raise UnsupportedError(asked, NAME, f"{what}; {way}attn_implementation={{'': {NAME!r}, '<sub-config>': {other!r}}}")


@torch.compiler.assume_constant_result
def takes_bool_masks(config: type) -> bool:
    """Whether the models of a config class can do with the masks of "sdpa": bool ones, and none where is_causal says it all.

    Other models may add their mask to scores of their own, join further columns to it, or have layers whose is_causal is not
    what they are. They get the mask of "eager": float, and always there.

    Args:
        config: the class of the model's config; one whose models are not found beside it counts as False.
    """
    return _all_vouched(config)


@functools.cache
def _all_vouched(config: type) -> bool:
    """Whether transformers runs all models of a config class by "sdpa", or by others and through the interface all along."""
    from transformers import PreTrainedModel

    for kind in config.__mro__:
        try:
            home = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        except ModuleNotFoundError:
            continue
        beside: list[Any] = [m for m in vars(home).values() if isinstance(m, type) and issubclass(m, PreTrainedModel)]
        models = [m for m in beside if m.config_class is kind]
        if models:
            return all(m._supports_sdpa or (m._supports_attention_backend and _supports_any(m)) for m in models)
    return False


def _supports_any(model: type) -> bool:
    """Whether transformers runs a model by any of its own implementations beside "eager"."""
    return any(getattr(model, flag, False) for flag in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"))


class _Read(NamedTuple):
    """What the code of a module's class speaks of."""

    interface: bool  # a registry of attention functions
    tables: tuple[str, ...]  # implementations in a table {"eager": SomeAttention, ...}
    builds: tuple[type, ...]  # classes named where it is made


def _first_of(model: type, table: tuple[str, ...]) -> str:
    """The implementation to use in place of this one."""
    return "sdpa" if "sdpa" in table and getattr(model, "_supports_sdpa", False) else "eager"


@functools.cache
def _parts(model: type) -> tuple[type, ...]:
    """The classes of modules that a model is made of, itself first; models inside it check themselves."""
    from transformers import PreTrainedModel

    found: list[type] = []
    left = [model]
    while left:
        part = left.pop()
        another = issubclass(part, PreTrainedModel) and part is not model
        if part in found or another or torch.nn.Module not in part.__mro__:
            continue
        found.append(part)
        left += _read(part).builds
    return tuple(found)


@functools.cache
def _read(part: type) -> _Read:
    """Read the compiled code of a class and of what it inherits: it is there without a source file, in a notebook too."""
    from transformers import AttentionInterface, PreTrainedModel

    interface = False
    tables: list[str] = []
    builds: list[type] = []
    common = {*torch.nn.Module.__mro__, *PreTrainedModel.__mro__}
    members = [(key, f) for kind in part.__mro__ if kind not in common for key, f in vars(kind).items()]
    for key, function in [(key, f) for key, member in members if (f := _function(member))]:
        for code, space in _code(function):
            for known in [space[name] for name in code.co_names if name in space]:
                interface = interface or isinstance(known, AttentionInterface)
                classes = [x for x in known.values() if isinstance(x, type)] if isinstance(known, dict) else [known]
                if isinstance(known, dict) and "eager" in known and classes:
                    tables += known
                if key == "__init__":
                    builds += [x for x in classes if isinstance(x, type)]
    return _Read(interface, tuple(tables), tuple(builds))


def _function(member: Any) -> FunctionType | None:
    """The Python function behind a class's member, decorators taken off; None where there is none."""
    member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    member = member.fget if isinstance(member, property) else member
    member = inspect.unwrap(member) if isinstance(member, Callable) else member  # type: ignore[arg-type]
    return member if isinstance(member, FunctionType) else None


def _code(function: FunctionType) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a function, of those written inside it and of those of its own file that it calls, with their globals."""
    seen: set[CodeType] = set()
    left = [(function.__code__, function.__globals__)]
    while left:
        code, space = left.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code, space
        left += [(inner, space) for inner in code.co_consts if isinstance(inner, CodeType)]
        called = [space[name] for name in code.co_names if isinstance(space.get(name), FunctionType)]
        left += [(f.__code__, f.__globals__) for f in called if f.__globals__ is space]
