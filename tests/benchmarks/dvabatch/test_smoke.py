"""The suites' own parts at their smallest."""

from __future__ import annotations

import pytest
from mlsys_bench.dvabatch import over_http
from mlsys_core.bench import BenchContext
from mlsys_core.errors import InvalidInputError
from rich.console import Console

QUICK = BenchContext(Console(quiet=True), is_quick=True, device="cpu", num_threads=1)


def test_servers_are_named() -> None:
    with pytest.raises(InvalidInputError, match="name running servers"):
        over_http.run(QUICK)


def test_texts_have_the_lengths_of_their_workload() -> None:
    assert len(over_http.texts_like("RTE", 5)) == 5
