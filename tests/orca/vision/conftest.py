"""Checkpoints of tiny models that see, each written and loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.orca.vision.models import tokenizer_json, write_model

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of an architecture's checkpoint, each written once."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}
    tokenizer = tokenizer_json()

    def path_of(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = write_model(tmp_path_factory.mktemp(architecture), architecture, tokenizer)
        return made[architecture]

    return path_of


@pytest.fixture(scope="session")
def vision_model(vision_folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """An architecture's checkpoint in fp32, loaded once."""
    from mlsys_orca.loading.load import load_model

    made: dict[str, LoadedModel] = {}

    def loaded(architecture: str) -> LoadedModel:
        if architecture not in made:
            made[architecture] = load_model(vision_folder(architecture), dtype="fp32")
        return made[architecture]

    return loaded
