import math

import pytest
import torch
from mlsys_orca.model.blocks import MLP, GatedMLP
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.embedding import Embedding
from mlsys_orca.model.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, Rotary, rotate

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


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", [-0.2689, 0.0, 1.7616]),
        ("gelu", [-0.1587, 0.0, 1.9545]),
        ("gelu_tanh", [-0.1588, 0.0, 1.9546]),
        ("relu", [0.0, 0.0, 2.0]),
    ],
)
def test_an_mlp_activates_what_goes_up_and_a_gated_one_its_gates(activation: str, expected: list[float]) -> None:
    x = torch.tensor([[-1.0, 0.0, 2.0]])
    assert torch.allclose(ACTIVATIONS[activation](x), torch.tensor([expected]), atol=1e-4)
    double, unit = Linear(torch.eye(3) * 2), Linear(torch.eye(3))
    assert torch.allclose(MLP(unit, double, activation=activation)(x), 2 * torch.tensor([expected]), atol=1e-3)
    gate_up = Linear(torch.cat((torch.eye(3), torch.eye(3) * 3)))
    gated = GatedMLP(gate_up, unit, activation=activation)(x)
    assert torch.allclose(gated, torch.tensor([expected]) * 3 * x, atol=1e-3)


def test_a_bias_is_added() -> None:
    linear = Linear(torch.ones(3, 2), torch.tensor([1.0, 2.0, 3.0]))
    assert linear(torch.ones(2, 2)).tolist() == [[3.0, 4.0, 5.0]] * 2


def test_layer_norm_centres_scales_and_shifts() -> None:
    weight, bias = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    norm = LayerNorm(weight, bias, eps=0.0, dtype=torch.bfloat16)
    assert norm(torch.tensor([[3.0, 5.0]])).tolist() == [[-0.5, 2.0]]
    assert norm(torch.tensor([[3.0, 5.0]])).dtype == torch.bfloat16
    unshifted = LayerNorm(weight, None, eps=0.0, dtype=torch.float32)
    assert unshifted(torch.tensor([[3.0, 5.0]])).tolist() == [[-1.0, 2.0]]


def test_heads_are_normalised_each_by_itself() -> None:
    norm = RMSNorm(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), eps=0.0, dtype=torch.float32)
    assert torch.allclose(norm(torch.tensor([[[5.0, 5.0], [3.0, -3.0]]])), torch.tensor([[[1.0, 1.0], [2.0, -2.0]]]))


def test_an_embedding_is_scaled_and_placed() -> None:
    table, position_table = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    ids, positions = torch.tensor([1, 0]), torch.tensor([1, 0])
    assert Embedding(table, scale=2.0)(ids, positions).tolist() == [[6.0, 8.0], [2.0, 4.0]]
    placed = Embedding(table, scale=10.0, positions=position_table)(ids, positions)
    assert torch.allclose(placed, torch.tensor([[30.3, 40.4], [10.1, 20.2]]))
    assert table.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_features_beyond_the_rotary_part_stay() -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    factors = Rotary(config(head_dim=8, rotary_dim=4), device=CPU)(torch.tensor([0, 7]))
    rotated = rotate(x, *factors)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], rotate(x[..., :4], *Rotary(config(), device=CPU)(torch.tensor([0, 7]))))


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x, *Rotary(config(), device=CPU)(torch.tensor([0, 7])))
    assert torch.allclose(rotated[0], x[0])
    for pair, frequency in enumerate((1.0, 0.1)):  # 100 ** (-2 i / 4)
        as_complex = torch.complex(x[1, :, pair], x[1, :, pair + 2]) * torch.polar(
            torch.tensor(1.0), torch.tensor(7 * frequency)
        )
        assert torch.allclose(rotated[1, :, pair], as_complex.real, atol=1e-6)
        assert torch.allclose(rotated[1, :, pair + 2], as_complex.imag, atol=1e-6)


def test_divisors_slow_the_rotation() -> None:
    scaled = Rotary(config(rope_divisors=(1.0, 4.0)), device=CPU)
    assert torch.allclose(scaled.inverse_frequencies, torch.tensor([1.0, 0.025]))
