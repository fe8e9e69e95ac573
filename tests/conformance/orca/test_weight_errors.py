"""Effect of quantised weights on a real model's predictions, by the benchmark whose table the documentation shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_bench.orca import weights
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.families import model_family

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.xdist_group("smollm2-conformance")]


@pytest.fixture(scope="module")
def rows(model_path: Path) -> dict[str, Any]:
    forms = ["packed", "int8", "int4"]
    rows = weights.measure(model_path, weights.TEXT, forms=forms, orders=1)
    return {row.weights: row for row in rows}


def test_features_in_another_order_compute_the_same(smollm2: LoadedModel, model_path: Path) -> None:
    checkpoint = weights.Shuffled(model_path, smollm2.config, seed=0)
    model = model_family("llama").load(smollm2.config, checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    token_ids = smollm2.tokenizer.encode(weights.TEXT[:200])
    exact = weights.log_probabilities(smollm2.model, token_ids)
    assert torch.allclose(weights.log_probabilities(model, token_ids), exact, atol=2e-3, rtol=0)


def test_a_files_own_weights_change_nothing(rows: dict[str, Any]) -> None:
    assert rows["packed"].divergence < 1e-6
    assert rows["packed"].agreement == 1
    assert rows["packed"].mebibytes < 93  # 513 in fp32


def test_int8_costs_next_to_nothing(rows: dict[str, Any]) -> None:
    assert abs(rows["int8"].nll_change) < 0.005
    assert 0 < rows["int8"].divergence < 0.003
    assert rows["int8"].mebibytes < 137


def test_int4_costs_a_few_percent(rows: dict[str, Any]) -> None:
    assert rows["int4"].nll_change < 0.06
    assert 0.01 < rows["int4"].divergence < 0.16
    assert rows["int4"].mebibytes < 100
