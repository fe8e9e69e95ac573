import math

import pytest
import torch
from mlsys_orca.models.config import ModelConfig
from mlsys_orca.models.layers import Linear, RMSNorm, Rotary, rotate, silu_mul

CPU = torch.device("cpu")


def config(**changes: object) -> ModelConfig:
    base: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "max_positions": 64,
        "norm_eps": 1e-5,
        "rope_theta": 100.0,
    }
    return ModelConfig(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 3, 64, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_packing_does_not_change_a_product(num_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype) / 6
    x = torch.randn(num_rows, 40, generator=generator).to(dtype)
    product = Linear(weight)(x)
    assert product.dtype == dtype
    assert torch.allclose(product.double(), x.double() @ weight.double().T, atol=tolerance, rtol=tolerance)


def test_a_dtype_that_is_not_packed_works_too() -> None:
    linear = Linear(torch.eye(3, dtype=torch.float64))
    assert not linear.is_packed
    assert linear(torch.ones(1, 3, dtype=torch.float64)).tolist() == [[1, 1, 1]]


def test_rms_norm_scales_rows_to_unit_square() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    norm = RMSNorm(torch.tensor([1.0, 2.0]), eps=1e-6, dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    root = math.sqrt(12.5)
    assert torch.allclose(norm(x).float(), torch.tensor([[3 / root, 8 / root], [0.0, 0.0]]), rtol=1e-2)


def test_silu_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(silu_mul(torch.cat((gate, up), dim=-1)), gate * gate.sigmoid() * up)


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *Rotary(config(), device=CPU)(torch.tensor([0, 7])))
    assert torch.allclose(turned[0], x[0])
    for pair, frequency in enumerate((1.0, 0.1)):  # 100 ** (-2 i / 4)
        as_complex = torch.complex(x[1, :, pair], x[1, :, pair + 2]) * torch.polar(
            torch.tensor(1.0), torch.tensor(7 * frequency)
        )
        assert torch.allclose(turned[1, :, pair], as_complex.real, atol=1e-6)
        assert torch.allclose(turned[1, :, pair + 2], as_complex.imag, atol=1e-6)


def test_divisors_slow_the_rotation() -> None:
    scaled = Rotary(config(rope_divisors=(1.0, 4.0)), device=CPU)
    assert torch.allclose(scaled.inverse_frequencies, torch.tensor([1.0, 0.025]))
