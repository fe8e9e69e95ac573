"""The kernels of training as compiled for each level that this machine executes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlsys_core.native.loader import builds_to_test, compiled_with
from mlsys_nimble.backends.cpu import library
from mlsys_nimble.training import kernels

BUILDS = builds_to_test()


@pytest.fixture(scope="module", params=BUILDS)
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compile the kernels for one level; :data:`BUILDS` has its flags."""
    with compiled_with(BUILDS[request.param], kernels.load, library.load):
        yield request.param
