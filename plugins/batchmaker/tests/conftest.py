"""The native code as compiled for each level that this machine executes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlsys_batchmaker.plan import planner
from mlsys_batchmaker.scheduling import compiled as scheduling
from mlsys_core.native.loader import builds_to_test, compiled_with

BUILDS = builds_to_test()


@pytest.fixture(scope="module", params=BUILDS)
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compile the kernels for one level; :data:`BUILDS` has its flags."""
    with compiled_with(BUILDS[request.param], planner._load, scheduling.load):
        yield request.param
