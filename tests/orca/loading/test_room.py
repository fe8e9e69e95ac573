"""Memory of a model's weights, told before they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.parallel.parts import weights_nbytes_at_least


@pytest.mark.parametrize("weights", ["float", "packed", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_is_at_most_what_the_weights_take(make_gguf: Callable[..., Path], weights: str, dtype: str) -> None:
    path = make_gguf(kind=gguf.GGMLQuantizationType.Q8_0)
    least = weights_nbytes_at_least(GgufFile(path), dtype=dtype, weights=weights)
    taken = load_model(path, dtype=dtype, weights=weights, backend="torch").weights_nbytes
    assert 0.5 * taken < least <= taken
