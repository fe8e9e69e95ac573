"""Matrices that GPTQ, AWQ, FP8 in blocks and compressed-tensors have quantised, packed here by each format's rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.config import UnsupportedModelError
from mlsys_orca.model.weights.quantized_directory import check_quantization
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conformance.orca.families import SHAPE, Case, log_probabilities, write_checkpoint
from tests.conformance.orca.test_families import PROMPTS

Packed = tuple[dict[str, Tensor], Tensor]  # tensors beside each other by part, and the values that they stand for
GROUP = 16


def packed(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, n * bits / 32] of codes [rows, n], the first in the lowest bits, or in ``order``."""
    of_one = codes.long().view(len(codes), -1, 32 // bits)
    if order is not None:
        of_one = of_one[..., list(order)]
    words = sum(of_one[..., i] << bits * i for i in range(32 // bits))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def random_codes(shape: tuple[int, int], bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros and scales [out, groups]."""
    rows, columns = shape
    groups = columns // GROUP
    scales = (torch.rand(rows, groups) * 0.05 + 0.01).half()
    return torch.randint(0, 1 << bits, shape), torch.randint(0, (1 << bits) - 1, (rows, groups)), scales


def values_of(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
    groups = torch.arange(codes.shape[1]) // GROUP if groups is None else groups
    return scales.float()[:, groups] * (codes - zeros[:, groups])


def gptq(shape: tuple[int, int], bits: int, *, shuffled: bool = False) -> Packed:
    codes, zeros, scales = random_codes(shape, bits)
    groups = torch.arange(shape[1]) // GROUP
    if shuffled:
        groups = groups[torch.randperm(shape[1])]
    parts = {
        "qweight": packed(codes, bits).T,  # [in / codes of a word, out]
        "qzeros": packed(zeros.T, bits),  # less one
        "scales": scales.T,
        "g_idx": groups.to(torch.int32),
    }
    return parts, values_of(codes, zeros + 1, scales, groups)


def awq(shape: tuple[int, int]) -> Packed:
    codes, zeros, scales = random_codes(shape, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": packed(codes.T, 4, order), "qzeros": packed(zeros.T, 4, order), "scales": scales.T}
    return parts, values_of(codes, zeros, scales)


def fp8_in_blocks(shape: tuple[int, int]) -> Packed:
    rows, columns = shape
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 24), -(-columns // 32)) * 0.1 + 0.05
    spread = scales.repeat_interleave(24, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def fp8_by_row(shape: tuple[int, int]) -> Packed:
    codes, scales = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(shape[0], 1).bfloat16() * 0.2
    return {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}, codes.float() * scales.float()


def int8_by_row(shape: tuple[int, int]) -> Packed:
    codes, scales = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0], 1) * 0.003
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def int8_with_zeros(shape: tuple[int, int]) -> Packed:
    parts, _ = int8_by_row(shape)
    zeros = torch.randint(-9, 9, (shape[0], 1), dtype=torch.int8)
    values = (parts["weight"].float() - zeros.float()) * parts["weight_scale"]
    return parts | {"weight_zero_point": zeros}, values


def packed_int4(shape: tuple[int, int]) -> Packed:
    codes, _, scales = random_codes(shape, 4)
    parts = {"weight_packed": packed(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    return parts, values_of(codes, torch.full_like(codes[:, : scales.shape[1]], 8), scales)


def of_compressed(form: str, kind: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Packed]]] = {
    "gptq-4": (GPTQ | {"bits": 4}, lambda shape: gptq(shape, 4)),
    "gptq-4-act-order": (GPTQ | {"bits": 4, "desc_act": True}, lambda shape: gptq(shape, 4, shuffled=True)),
    "gptq-8": (GPTQ | {"bits": 8}, lambda shape: gptq(shape, 8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 32]}, fp8_in_blocks),
    "compressed-fp8": (of_compressed("float-quantized", "float", 8), fp8_by_row),
    "compressed-int8": (of_compressed("int-quantized", "int", 8), int8_by_row),
    "compressed-int8-zeros": (of_compressed("int-quantized", "int", 8), int8_with_zeros),
    "compressed-int4": (of_compressed("pack-quantized", "int", 4), packed_int4),
}


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_the_values_that_their_codes_stand_for(tmp_path: Path, name: str) -> None:
    """The same directory with plain values gives the same bits, in native products."""
    settings, make = FORMATS[name]
    write_checkpoint(tmp_path, Case("Qwen2", SHAPE | {"num_hidden_layers": 2, "intermediate_size": 96}))
    plain = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(1)
    quantised = {}
    for key in [key for key in plain if key.endswith("_proj.weight")]:
        parts, plain[key] = make((plain[key].shape[0], plain[key].shape[1]))
        quantised |= {f"{key.removesuffix('.weight')}.{part}": values.contiguous() for part, values in parts.items()}
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = load_model(tmp_path, dtype="fp32")

    rest = {key: values for key, values in plain.items() if not key.endswith("_proj.weight")}
    save_file(rest | quantised, tmp_path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = load_model(tmp_path, dtype="fp32")
    assert isinstance(found.model, NativeDecoder)
    for ours, theirs in zip(log_probabilities(found, PROMPTS), log_probabilities(expected, PROMPTS), strict=True):
        assert torch.equal(ours, theirs)

    broken = next(key for key in quantised if key.endswith(("scales", "weight_scale", "weight_scale_inv")))
    del quantised[broken]
    save_file(rest | quantised, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"no tensor|of type|there is no tensor"):
        load_model(tmp_path, dtype="fp32")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (GPTQ | {"bits": 3}, "codes of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "fp8"}, "weight_block_size of None"),
        (of_compressed("marlin-24", "int", 4), "format 'marlin-24'"),
        (of_compressed("float-quantized", "float", 4), "other than 8 bits"),
        (of_compressed("pack-quantized", "int", 4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ],
)
def test_what_is_not_read_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        check_quantization(settings)
