"""A way to run one small kernel around a tile function, in the interpreter, on any machine."""

from collections.abc import Callable
from typing import Any

import pytest

from andrea_triton.launch.configs import Config
from andrea_triton.launch.interpreter import interpret
from andrea_triton.launch.plan import Launch


@pytest.fixture
def interpreted() -> Callable[..., None]:
    """interpreted(kernel, *run-time arguments, grid=(1, 1), **constexprs)."""

    def start(kernel: Any, *args: Any, grid: tuple[int, int] = (1, 1), **constexprs: Any) -> None:
        config = Config(16, 16)
        interpret(Launch("under test", kernel, args, constexprs, grid, config, (config,)))

    return start
