"""Weights that ``load_model(weights=...)`` keeps quantised or leaves floating, and that either computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from torch import Tensor

from tests.orca.forwards import logits_of

Make = Callable[..., Path]
Q = gguf.GGMLQuantizationType


def matrices(path: Path, weights: Any) -> dict[str, Any]:
    """Every matrix of the model, by the name of its module."""
    model: Any = load_model(path, dtype="fp32", weights=weights, backend="torch").model
    found = {name: module.weight for name, module in model.named_modules() if isinstance(module, Linear)}
    return found | {name: module.table for name, module in model.named_modules() if isinstance(module, Embedding)}


def logits(path: Path, weights: Any, **options: Any) -> Tensor:
    model = load_model(path, **({"dtype": "fp32", "weights": weights} | options)).model
    return torch.cat(logits_of(model, [[5, 9, 200, 31], [7]]))


@pytest.mark.parametrize(("kind", "bits"), [(Q.Q8_0, 8), (Q.Q4_0, 4), (Q.Q4_1, 4), (Q.Q5_0, 8), (Q.Q5_1, 8)])
def test_packed_weights_are_the_files(make_gguf: Make, kind: Q, bits: int) -> None:
    path = make_gguf(kind=kind)
    found = matrices(path, "packed")
    assert all(isinstance(matrix, QuantizedMatrix) and matrix.bits == bits for matrix in found.values())
    for name, matrix in matrices(path, "float").items():
        assert torch.equal(found[name].dequantized(), matrix)


def test_a_tied_table_is_kept_once(make_gguf: Make) -> None:
    found = matrices(make_gguf(kind=Q.Q8_0), "packed")
    assert found["head"] is found["embedding"]


def test_the_weights_memory_is_that_of_what_is_kept(make_gguf: Make, weights: dict[str, np.ndarray]) -> None:
    path = make_gguf(kind=Q.Q8_0)
    matrix_values = sum(values.size for values in weights.values() if values.ndim == 2)
    others = 4 * (sum(values.size for values in weights.values() if values.ndim == 1) + 8)  # norms, rotary frequencies
    for form, bits in (("float", 32), ("packed", 8.5), ("int8", 8.5)):
        loaded = load_model(path, dtype="fp32", weights=form, backend="torch")  # type: ignore[arg-type]
        assert loaded.weights_nbytes == matrix_values * bits / 8 + others
    native = load_model(path, dtype="fp32", weights="packed")  # the tied table is packed again for the product
    assert native.weights_nbytes > load_model(path, weights="packed", backend="torch").weights_nbytes + 260 * 64


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16])
def test_floating_weights_stay_floating_when_packed(make_gguf: Make, kind: Q) -> None:
    assert all(isinstance(matrix, Tensor) for matrix in matrices(make_gguf(kind=kind), "packed").values())


@pytest.mark.parametrize("kind", [Q.F32, Q.Q4_1])
def test_int8_and_int4_quantise_whatever_the_file_has(make_gguf: Make, kind: Q) -> None:
    path = make_gguf(kind=kind)
    assert {matrix.bits for matrix in matrices(path, "int8").values()} == {8}
    bits = {name.rpartition(".")[2]: matrix.bits for name, matrix in matrices(path, "int4").items()}
    assert bits == {"embedding": 8, "head": 8, "qkv": 8, "output": 4, "gate_up": 4, "down": 4}


def experts(weights: dict[str, np.ndarray], *, number: int) -> dict[str, np.ndarray]:
    """The tiny model's tensors with a mixture in place of each MLP."""
    tensors = {name: values for name, values in weights.items() if "ffn_" not in name or "norm" in name}
    generator = np.random.default_rng(1)
    for layer in range(2):
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = generator.normal(0, 0.2, (number, 64)).astype(np.float32)
        for role, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            values = generator.normal(0, 0.2, (number, *shape)).astype(np.float32)
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = values
    return tensors


def test_experts_are_quantised_one_by_one_and_routers_are_not(make_gguf: Make, weights: dict[str, np.ndarray]) -> None:
    changes = {"llama.expert_count": 3, "llama.expert_used_count": 2}
    path = make_gguf(changes, tensors=experts(weights, number=3), kind=Q.Q8_0)
    plain, packed, int4 = (matrices(path, form) for form in ("float", "packed", "int4"))
    assert plain.keys() == packed.keys() == int4.keys()
    assert plain["layers.0.mlp.experts.2.gate_up"].shape == (192, 64)
    for name, matrix in plain.items():
        assert torch.equal(packed[name].dequantized(), matrix)
        assert isinstance(int4[name], Tensor) == name.endswith("router")
    expected = logits(path, "float")
    assert torch.allclose(logits(path, "packed"), expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(logits(path, "int8"), expected, rtol=1e-4, atol=1e-4)  # the file has such codes
    assert not torch.allclose(logits(path, "int4"), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_int8_moves_the_logits_by_two_hundredths_at_most(make_gguf: Make, backend: str) -> None:
    path = make_gguf()  # of normal weights, each of nine products in a row is wrong by 0.54 %
    exact, found = logits(path, "float"), logits(path, "int8", backend=backend)
    assert 0 < (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("weights", ["packed", "int8", "int4"])
def test_bf16_computes_with_quantised_weights_too(make_gguf: Make, weights: str, backend: str) -> None:
    path = make_gguf(kind=Q.Q8_0)
    exact, found = logits(path, weights, backend=backend), logits(path, weights, backend=backend, dtype="bf16")
    assert (found - exact).norm() / exact.norm() < 0.03


def test_rows_that_no_group_divides_stay_floating(make_gguf: Make, weights: dict[str, np.ndarray]) -> None:
    odd = {name: values[:40] for name, values in weights.items() if "gate" in name or "up" in name}
    odd |= {name: np.ascontiguousarray(values[:, :40]) for name, values in weights.items() if "down" in name}
    path = make_gguf({"llama.feed_forward_length": 40}, tensors=weights | odd)
    floating = {name for name, matrix in matrices(path, "int8").items() if isinstance(matrix, Tensor)}
    assert floating == {"layers.0.mlp.down", "layers.1.mlp.down"}


def test_groups_of_16_serve_where_32_do_not_divide(make_gguf: Make, weights: dict[str, np.ndarray]) -> None:
    odd = {name: values[:80] for name, values in weights.items() if "gate" in name or "up" in name}
    odd |= {name: np.ascontiguousarray(values[:, :80]) for name, values in weights.items() if "down" in name}
    path = make_gguf({"llama.feed_forward_length": 80}, tensors=weights | odd)
    sizes = {name: matrix.group_size for name, matrix in matrices(path, "int8").items()}
    assert {name for name, size in sizes.items() if size == 16} == {"layers.0.mlp.down", "layers.1.mlp.down"}


def test_other_forms_are_refused_by_name(make_gguf: Make) -> None:
    with pytest.raises(InvalidInputError, match="'int2' are not known; float, packed, int8, int4 are"):
        load_model(make_gguf(), weights="int2")  # type: ignore[arg-type]
