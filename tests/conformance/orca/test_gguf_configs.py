"""A GGUF says of a model what its directory says: each family's configuration, read from both, field by field."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import pytest
from mlsys_orca.loading.load import load_model

from tests.conformance.orca.families import CASES, GGUF, write_checkpoint
from tests.conformance.orca.to_gguf import convert_to_gguf

DIFFERENT = {  # fields that a GGUF has no place for, or says otherwise
    "gemma2": {"attention_scale"},
    "gemma3": {"attention_scale"},
    "granite-hybrid-dense": {"intermediate_size"},
    "qwen3-5": {"recurrent"},  # the order of heads
    "qwen3-5-moe": {"recurrent"},
}


def nearly(value: Any) -> Any:
    """Return numbers as a file of 32-bit floats has them."""
    if isinstance(value, dict):
        return {key: nearly(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nearly(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_says_what_the_directory_says(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, CASES[name])
    path = convert_to_gguf(reference, getattr(gguf.MODEL_ARCH, GGUF[name]), tmp_path / "model.gguf")
    said, expected = (nearly(asdict(load_model(each, dtype="fp32").config)) for each in (path, tmp_path))
    different = {key for key in expected if said[key] != expected[key]}
    assert different - {"architecture"} == DIFFERENT.get(name, set())
