import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.gguf_blocks import check_types, dequantize_into

Q = GGMLQuantizationType


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
@pytest.mark.parametrize("rows", [1, 1500])  # one piece; several with a rest
def test_values_are_the_gguf_librarys_to_the_bit(kind: GGMLQuantizationType, rows: int) -> None:
    values = np.random.default_rng(rows).normal(0, 3, (rows, 96)).astype(np.float32)
    data = quantize(values, kind).view(np.uint8)
    expected = torch.from_numpy(dequantize(quantize(values, kind), kind).copy())
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((rows, 96), torch.nan, dtype=dtype)
        dequantize_into(data.reshape(-1), kind, out)
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K])
def test_k_quants_come_from_the_library(kind: GGMLQuantizationType) -> None:
    data = np.random.default_rng(0).integers(0, 100, (200, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    out = torch.empty(200, 256)
    dequantize_into(data.reshape(-1), kind, out)
    assert np.array_equal(out.numpy(), dequantize(data, kind))


def test_a_type_nobody_dequantises_is_refused_by_name() -> None:
    check_types([Q.F32, Q.Q4_1, Q.Q6_K, Q.IQ4_XS])
    with pytest.raises(InvalidInputError, match=r"type Q8_1 cannot be read; F32, F16"):
        check_types([Q.F32, Q.Q8_1])
