"""The score of planted bugs."""

import sys
from collections.abc import Iterator

import pytest

WANTED = 0.95  # the part of the planted bugs that must be caught


@pytest.fixture(scope="module")
def score(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What gave each bug of a file away, nothing for one that got through. At the end the score is printed, and asserted for
    all but the file's SURVIVORS, which are no bugs."""
    found: dict[str, str] = {}
    yield found
    bugs = {name: text for name, text in found.items() if name not in request.module.SURVIVORS}
    caught = sum(bool(text) for text in bugs.values())
    sys.stdout.write(
        f"\n{caught} of {len(bugs)} planted bugs caught, beside {len(found) - len(bugs)} changes that are harmless\n"
    )
    assert caught >= WANTED * len(bugs), f"only {caught} of {len(bugs)} planted bugs are caught"
