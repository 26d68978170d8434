"""The error family: what may be caught as what, and what a message keeps."""

import pickle

import pytest

from andrea_triton.errors import AndreaError, CompileError, DTypeError, ShapeError, UnsupportedError


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ShapeError, ValueError),
        (DTypeError, TypeError),
        (UnsupportedError, NotImplementedError),
        (CompileError, RuntimeError),
    ],
)
def test_errors_are_caught_as_the_family_and_as_the_builtin(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, AndreaError)
    assert issubclass(kind, builtin)


def test_unsupported_names_feature_backend_and_reason() -> None:
    error = UnsupportedError("dropout_p", "torch", "use backend='triton'")
    assert (error.feature, error.backend, error.reason) == ("dropout_p", "torch", "use backend='triton'")
    assert str(error) == "dropout_p is not supported by torch: use backend='triton'"


def test_unsupported_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(UnsupportedError("bias", "varlen", "use score")))
    assert (error.feature, error.backend, error.reason) == ("bias", "varlen", "use score")
