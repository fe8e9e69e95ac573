"""Experts in the native program: blocks of 4 bits, rows in int8, packed copies, any company and threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mlsys_orca.backends.native import kept
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.kept import Copies
from mlsys_orca.loading import load
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.experts import Choice

from tests.orca.forwards import logits_of

HIDDEN, INNER, EXPERTS, CHOSEN = 256, 256, 6, 3
FIELDS = {
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 64,
    "llama.feed_forward_length": INNER,
    "llama.expert_count": EXPERTS,
    "llama.expert_used_count": CHOSEN,
}
PROMPTS = [[(7 * i + 5 * j + 3) % 260 for j in range(length)] for i, length in enumerate([1, 40, 3, 90, 7])]


def tensors(kind: str) -> dict[str, Any]:
    """A Mixtral of two layers, its products in blocks of ``kind``."""
    generator = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (260, HIDDEN)}
    for i in range(2):
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("output", HIDDEN)):
            shapes[f"blk.{i}.attn_{name}.weight"] = (rows, HIDDEN)
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = (EXPERTS, HIDDEN)
        shapes |= {f"blk.{i}.ffn_{each}_exps.weight": (EXPERTS, INNER, HIDDEN) for each in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down_exps.weight"] = (EXPERTS, HIDDEN, INNER)
    quantization, found = gguf.GGMLQuantizationType[kind], dict[str, Any]()
    for name, shape in shapes.items():
        values = generator.normal(0, 0.15, shape).astype(np.float32)
        is_kept = "gate_inp" in name
        found[name] = values if is_kept else (gguf.quants.quantize(values, quantization), quantization)
    for name in ["output_norm.weight", *(f"blk.{i}.{each}_norm.weight" for i in range(2) for each in ("attn", "ffn"))]:
        found[name] = np.ones(HIDDEN, dtype=np.float32)
    return found


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4"])
def test_blocks_compute_as_their_values_do(make_gguf: Any, kind: str) -> None:
    path = make_gguf(FIELDS, tensors=tensors(kind))
    exact = torch.cat(logits_of(load_model(path, dtype="fp32", backend="torch").model, PROMPTS))
    native = load_model(path, dtype="fp32", backend="native", activations="float").model
    assert torch.allclose(torch.cat(logits_of(native, PROMPTS)), exact, atol=2e-4 * float(exact.std()), rtol=0)
    rounded = load_model(path, dtype="fp32", backend="native", activations="int8").model
    assert isinstance(rounded, NativeDecoder)
    assert rounded.num_integer_products == 2 * (2 + 2 * EXPERTS) + 1  # all but the routers, which stay floating
    both = torch.stack((exact.flatten(), torch.cat(logits_of(rounded, PROMPTS)).flatten()))
    assert torch.corrcoef(both)[0, 1] > 0.9  # a score may be rounded past another's


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_neither_company_nor_threads_change_a_bit(make_gguf: Any, dtype: str, activations: Any) -> None:
    model: Any = load_model(
        make_gguf(FIELDS, tensors=tensors("Q4_0")), dtype=dtype, backend="native", activations=activations
    ).model
    together = logits_of(model, PROMPTS)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits_of(model, [prompt])[0], row)
    for one, other in zip(logits_of(model.with_threads(3), PROMPTS), together, strict=True):
        assert torch.equal(one, other)


def test_a_packed_copy_has_experts(make_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_LEAST_NBYTES", 0)
    path = make_gguf(FIELDS, tensors=tensors("Q4_0"))
    expected = torch.cat(logits_of(load_model(path, dtype="fp32", backend="native").model, PROMPTS))
    copies = Copies(tmp_path / "copies", most_nbytes=1 << 30)
    for _ in range(2):  # written, then read
        loaded = load.load_model(path, dtype="fp32", backend="native", copies=copies)
        assert torch.equal(torch.cat(logits_of(loaded.model, PROMPTS)), expected)
        assert len(list((tmp_path / "copies").iterdir())) == 1


@pytest.mark.parametrize("scoring", ["softmax_of_chosen", "softmax", "sigmoid"])
@pytest.mark.parametrize("group_score", ["largest", "two_largest"])
def test_choices_are_those_of_the_formulas(scoring: Any, group_score: Any) -> None:
    """Groups of experts, a preference that counts in the comparison alone, weights that sum to one."""
    torch.manual_seed(1)
    scores, preference = torch.randn(50, 12), torch.randn(12)
    choice = Choice(
        num_chosen=3,
        scoring=scoring,
        sums_to_one=scoring == "sigmoid",
        scale=2.5,
        preference=preference,
        num_groups=4,
        num_chosen_groups=2,
        group_score=group_score,
    )
    weights, chosen = choice(scores)
    for row, (own, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        values = {"sigmoid": scores[row].sigmoid(), "softmax": scores[row].softmax(0)}.get(scoring, scores[row])
        compared = values + preference
        groups = [sorted(compared[3 * g : 3 * g + 3].tolist(), reverse=True) for g in range(4)]
        best = sorted(range(4), key=lambda g: -sum(groups[g][: 1 + (group_score == "two_largest")]))[:2]
        allowed = [i for i in range(12) if i // 3 in best]
        assert experts == sorted(allowed, key=lambda i: -float(compared[i]))[:3]
        expected = values[experts].softmax(0) if scoring == "softmax_of_chosen" else values[experts]
        expected = 2.5 * (expected / expected.sum() if scoring == "sigmoid" else expected)
        assert torch.allclose(own, expected)
