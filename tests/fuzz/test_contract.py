"""The whole contract on calls that nobody thought of.

Every run tries the same few calls, continuous integration (.ci/run) the same hundreds. By hand, more of them, and others every
time (a seed repeats a run), with a failure shrunk to the smallest call that has it:

    FUZZ_EXAMPLES=2000 pytest -n 0 --hypothesis-seed=1 tests/fuzz

runs each property on that many calls.
"""

import os

from hypothesis import HealthCheck, given, settings

from tests.fuzz.calls import Drawn, drawn_calls
from tests.fuzz.judge import assert_accurate_call, small_tiles

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
fuzz = settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)


@fuzz
@given(drawn=drawn_calls())
def test_accuracy_of_the_kernels(drawn: Drawn) -> None:
    with small_tiles():
        assert_accurate_call(drawn, "interpreter")


@fuzz
@given(drawn=drawn_calls())
def test_accuracy_on_the_cpu(drawn: Drawn) -> None:
    assert_accurate_call(drawn, "torch")
