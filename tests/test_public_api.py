"""What a user sees: the names, how each is explained, and that it works where Triton is not installed."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import andrea_triton

FUNCTIONS = {
    "attention",
    "attention_weights",
    "causal_attention",
    "decode_attention",
    "dropout_mask",
    "explain",
    "merge_attention",
    "scaled_dot_product_attention",
    "varlen_attention",
}
SETTINGS = {"Explanation", "KVCache", "Mask", "PagedKVCache", "Score"}
ERRORS = {"AndreaError", "CompileError", "DTypeError", "ShapeError", "UnsupportedError"}
SECTIONS = ["Args:", "Returns:", "Raises:", "Source:", "Example:"]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from andrea_triton import UnsupportedError, attention
q, k, v = (torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
for backend in ("reference", "torch", None):
    out = attention(q, k, v, causal=True, backend=backend)
    torch.testing.assert_close(out, wanted)
    torch.autograd.grad(out.sum(), (q, k, v))
try:
    attention(q, k, v, backend="interpreter")
except UnsupportedError as error:
    print(error)
"""


def test_all_lists_the_documented_names() -> None:
    assert set(andrea_triton.__all__) == FUNCTIONS | SETTINGS | ERRORS
    assert len(andrea_triton.__all__) == len(set(andrea_triton.__all__))


def test_nothing_else_is_public() -> None:
    public = {name for name, value in vars(andrea_triton).items() if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(andrea_triton, name))}
    assert public - modules == set(andrea_triton.__all__)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function_is_explained(name: str) -> None:
    doc = inspect.getdoc(getattr(andrea_triton, name)) or ""
    places = [doc.find(f"\n{section}") for section in SECTIONS]
    assert min(places) > 0, f"{name} lacks {[s for s, at in zip(SECTIONS, places, strict=True) if at < 0]}"
    assert places == sorted(places), f"{name} has its sections in another order than {SECTIONS}"
    assert ">>> " in doc[places[-1] :]


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function_is_typed_and_each_argument_is_explained(name: str) -> None:
    function = getattr(andrea_triton, name)
    signature, doc = inspect.signature(function), inspect.getdoc(function) or ""
    arguments = doc[doc.find("\nArgs:") : doc.find("\nReturns:")]
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter.name} has no type"
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, f"{name}: **{parameter.name}"
        assert parameter.name in arguments, f"{name} does not explain {parameter.name}"


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_setting_is_explained(name: str) -> None:
    """A generated docstring only repeats the fields."""
    doc = getattr(andrea_triton, name).__doc__ or ""
    assert doc and not doc.startswith(f"{name}(")


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_error_is_explained_and_caught_as_the_family(name: str) -> None:
    error = getattr(andrea_triton, name)
    assert issubclass(error, andrea_triton.AndreaError)
    assert error.__doc__


def test_works_without_triton() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "triton" in run.stdout.lower()


def test_package_is_typed() -> None:
    assert (Path(andrea_triton.__file__).parent / "py.typed").exists()
