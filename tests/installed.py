"""Models that come as packages, for tests that run on real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError
from mlsys_core.models import resolve_model


def installed_model(name: str) -> Path:
    """Return the file or folder of a model, without importing its package; skip the test where there is none."""
    try:
        return resolve_model(name, settings().cache_dir)
    except MissingDependencyError as error:
        pytest.skip(str(error))
