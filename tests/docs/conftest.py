"""The process that pages and their commands are forks of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warm import Warm
from tests.warm_mlsys import place

IMPORTED = ("torch", "sklearn.pipeline", "pandas", "fastapi", "httpx", "uvicorn", "tokenizers", "mlsys_orca.api.server")


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    """A process that has imported what most pages do; each page runs in a fork of it."""
    warm = Warm("tests.docs.run_page", *IMPORTED)
    yield warm
    warm.close()


@pytest.fixture(scope="package")
def mlsys(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command ``mlsys``, which runs in a fork, too."""
    return place(warm, tmp_path_factory.mktemp("commands"))
