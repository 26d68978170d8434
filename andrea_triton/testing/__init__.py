"""What tests, bench and the check of a machine share: a catalogue of named cases, their tensors, and the rule of accuracy."""

from .accuracy import Attend, Results, assert_accurate, attend_reference, check, eager_errors, eager_runs, error_of, run
from .cases import AXES, CASES, Case, Layout, pairwise_cases
from .inputs import Inputs, cast, guard_band, make_inputs

__all__ = [
    "AXES",
    "CASES",
    "Attend",
    "Case",
    "Inputs",
    "Layout",
    "Results",
    "assert_accurate",
    "attend_reference",
    "cast",
    "check",
    "eager_errors",
    "eager_runs",
    "error_of",
    "guard_band",
    "make_inputs",
    "pairwise_cases",
    "run",
]
