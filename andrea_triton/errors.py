"""The errors that the library raises on purpose; all of them can be caught as AndreaError."""


class AndreaError(Exception):
    """Base of every error raised on purpose.

    Example:
        >>> issubclass(ShapeError, AndreaError) and issubclass(ShapeError, ValueError)
        True
    """


class ShapeError(AndreaError, ValueError):
    """A shape or a value is wrong: the message says what was got, what was wanted and the way out."""


class DTypeError(AndreaError, TypeError):
    """A type, dtype or device is wrong: the message says what was got, what was wanted and the way out."""


class UnsupportedError(AndreaError, NotImplementedError):
    """A valid request that this backend, or this form of the call, cannot serve.

    Args:
        feature: what was asked for, by its argument's name.
        backend: who cannot do it.
        reason: why, and the way out.

    Example:
        >>> str(UnsupportedError("dropout_p", "torch", "use backend='reference'"))
        "dropout_p is not supported by torch: use backend='reference'"
    """

    def __init__(self, feature: str, backend: str, reason: str) -> None:
        super().__init__(feature, backend, reason)
        self.feature = feature
        self.backend = backend
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.feature} is not supported by {self.backend}: {self.reason}"


class CompileError(AndreaError, RuntimeError):
    """A kernel could not be compiled for a target."""


class FitError(CompileError):
    """A kernel was compiled, and takes more of a resource than the card has."""
