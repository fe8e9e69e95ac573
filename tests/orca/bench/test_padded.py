"""A Llama with rows filled up to blocks of K-quants computes the same; the likelihood's sums are what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from mlsys_bench.orca import padded
from mlsys_bench.orca.likelihood import row_of, windows_of
from mlsys_bench.orca.llama_likelihood import negative_logs
from mlsys_bench.orca.weights import log_probabilities
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model


def quantise(matrix: np.ndarray, kind: str) -> np.ndarray:
    """gguf's own quantiser, which has the types of 32 weights."""
    return gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind])


def test_a_model_with_wide_rows_is_the_same_model(
    make_gguf: Callable[..., Path], weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    tied = {name: values for name, values in weights.items() if name != "output.weight"}
    source, wide = make_gguf(tensors=tied, kind=gguf.GGMLQuantizationType.Q8_0), tmp_path / "wide.gguf"
    padded.write(source, "q8_0", wide, quantise)  # type: ignore[arg-type]  # codes come out as they were
    tokens = [5, 9, 200, 31, 7, 44]
    models = [load_model(path, dtype="fp32", backend="torch", weights="packed") for path in (source, wide)]
    assert models[1].config.hidden_size == 256 > models[0].config.hidden_size
    before, after = (log_probabilities(loaded.model, tokens) for loaded in models)
    assert torch.allclose(after, before, atol=1e-4)
    assert not torch.allclose(before[0], before[1], atol=1e-2)


def test_negative_logs_are_torchs() -> None:
    logits, targets = torch.randn(5, 40) * 4, [3, 0, 39, 7, 7]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none")
    assert np.allclose(negative_logs(logits.numpy(), targets), expected.numpy(), atol=1e-5)


def test_a_row_has_the_error_of_the_differences() -> None:
    row = row_of("q4_0", [2.0, 4.0, 6.0], [2.0, 2.0, 2.0], [1.0, 4.0, 4.0])
    assert row.int8_change == pytest.approx(4 / 3 - 1)
    assert row.standard_error == pytest.approx(np.std([1, 0, 2], ddof=1) / 3**0.5 / 3)
    assert row.float_change == pytest.approx(2 / 3 - 1)


def test_a_short_text_is_refused() -> None:
    assert [len(window) for window in windows_of(range(1100), 2)] == [512, 512]
    with pytest.raises(InvalidInputError, match="has 1100 tokens; 3 windows of 512"):
        windows_of(range(1100), 3)
