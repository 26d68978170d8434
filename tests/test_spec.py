"""Keywords to AttentionSpec: canonical forms, limits, messages."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea_triton.errors import DTypeError, ShapeError
from andrea_triton.spec import AttentionSpec, Mask, Score, default_scale, make_spec


def test_defaults_are_full_attention() -> None:
    assert make_spec() == AttentionSpec(None, None, None, None, None, 0.0, False)


@pytest.mark.parametrize(
    ("causal", "window", "band"),
    [
        (False, None, (None, None)),
        (True, None, (None, 0)),
        (True, 4, (3, 0)),
        (False, 4, (3, 3)),
        (True, 1, (0, 0)),
        (False, 1, (0, 0)),
        (False, (5, 2), (5, 2)),
        (True, (5, 2), (5, 0)),
        (True, (5, None), (5, 0)),
        (False, (None, 2), (None, 2)),
        (False, (None, None), (None, None)),
        (True, (None, None), (None, 0)),
        (False, [5, 2], (5, 2)),
    ],
)
def test_band(causal: bool, window: Any, band: tuple[int | None, int | None]) -> None:
    spec = make_spec(causal=causal, window=window)
    assert (spec.left, spec.right) == band


@given(width=st.integers(1, 2**40), right=st.none() | st.integers(0, 2**40))
def test_calls_that_mean_the_same_have_equal_specs(width: int, right: int | None) -> None:
    assert make_spec(causal=True, window=width) == make_spec(causal=True, window=(width - 1, right))
    assert hash(make_spec(window=width)) == hash(make_spec(window=(width - 1, width - 1)))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.35, 2, 3.4e38, -3.4e38])
def test_any_finite_scale(scale: float) -> None:
    assert make_spec(scale=scale).scale == float(scale)


def test_numbers_become_floats() -> None:
    spec = make_spec(scale=1, softcap=30, dropout_p=0)
    assert [type(x) for x in (spec.scale, spec.softcap, spec.dropout_p)] == [float, float, float]


@pytest.mark.parametrize("q_start", [None, 0, -5, 2**28, -(2**28)])
def test_q_start_is_kept(q_start: int | None) -> None:
    assert make_spec(q_start=q_start).q_start == q_start


def test_default_scale() -> None:
    assert default_scale(64) == 0.125
    assert default_scale(2) == 1 / math.sqrt(2)


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_spec().scale = 1.0  # type: ignore[misc]


def test_functors_have_defaults() -> None:
    assert Score("fn") == ("fn", None, (), None)
    assert Mask("fn") == ("fn", (), None)


WRONG_VALUES: list[tuple[dict[str, Any], list[str]]] = [
    ({"window": 0}, ["window is 0", "at least 1 key", "None"]),
    ({"window": -3}, ["window is -3", "at least 1 key", "None"]),
    ({"window": (-1, 2)}, ["window[0] (left) is -1", "at least 0", "None"]),
    ({"window": (1, -2)}, ["window[1] (right) is -2", "at least 0", "None"]),
    ({"window": (1, 2, 3)}, ["window has 3 entries", "(left, right)", "None"]),
    ({"q_start": 2**28 + 1}, ["q_start is 268435457", "2**28", "None"]),
    ({"q_start": -(2**28) - 1}, ["q_start is -268435457", "2**28", "None"]),
    ({"scale": math.inf}, ["scale is inf", "finite", "None"]),
    ({"scale": math.nan}, ["scale is nan", "finite", "None"]),
    ({"scale": 1e39}, ["scale is 1e+39", "float32", "None"]),
    ({"scale": 10**400}, ["scale is inf", "finite", "None"]),
    ({"softcap": 0.0}, ["softcap is 0.0", "above 0", "None"]),
    ({"softcap": -1.0}, ["softcap is -1.0", "above 0", "None"]),
    ({"softcap": math.inf}, ["softcap is inf", "finite", "None"]),
    ({"softcap": math.nan}, ["softcap is nan", "finite", "None"]),
    ({"softcap": 1e-45}, ["softcap is 1e-45", "float32", "None"]),
    ({"dropout_p": 1.0}, ["dropout_p is 1.0", "0 <= dropout_p < 1", "0.0"]),
    ({"dropout_p": -0.1}, ["dropout_p is -0.1", "0 <= dropout_p < 1", "0.0"]),
    ({"dropout_p": math.nan}, ["dropout_p is nan", "0 <= dropout_p < 1", "0.0"]),
]
WRONG_TYPES: list[tuple[dict[str, Any], list[str]]] = [
    ({"window": True}, ["window is True (bool)", "an int or a pair", "None"]),
    ({"window": 4.0}, ["window is 4.0 (float)", "an int or a pair", "None"]),
    ({"window": "4"}, ["window is '4' (str)", "an int or a pair", "None"]),
    ({"window": {}}, ["window is dict", "an int or a pair", "None"]),
    ({"window": (True, 1)}, ["window[0] (left) is True (bool)", "an int", "int(", "None"]),
    ({"window": (1, 2.5)}, ["window[1] (right) is 2.5 (float)", "an int", "int(", "None"]),
    ({"q_start": 1.0}, ["q_start is 1.0 (float)", "an int", "int(q_start)", "None"]),
    ({"q_start": False}, ["q_start is False (bool)", "an int", "int(q_start)", "None"]),
    ({"scale": True}, ["scale is True (bool)", "a Python number", "float(scale)"]),
    ({"scale": "1"}, ["scale is '1' (str)", "a Python number", "float(scale)"]),
    ({"scale": 1j}, ["scale is complex", "a Python number", "float(scale)"]),
    ({"softcap": []}, ["softcap is list", "a Python number", "float(softcap)"]),
    ({"dropout_p": None}, ["dropout_p is NoneType", "a Python number", "float(dropout_p)"]),
    ({"causal": 1}, ["causal is 1 (int)", "True or False", "bool(causal)"]),
    ({"precise": None}, ["precise is NoneType", "True or False", "bool(precise)"]),
]


@pytest.mark.parametrize(("keywords", "parts"), WRONG_VALUES)
def test_wrong_values(keywords: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ShapeError) as caught:
        make_spec(**keywords)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(("keywords", "parts"), WRONG_TYPES)
def test_wrong_types(keywords: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(DTypeError) as caught:
        make_spec(**keywords)
    assert [part for part in parts if part not in str(caught.value)] == []
