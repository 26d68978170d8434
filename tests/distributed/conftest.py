"""Four ranks for every file here."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks, ranks_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes, of which two also work alone."""
    with ranks_of(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started
