import pytest
import torch
from mlsys_orca.backends.triton.rowwise import activate, gated
from mlsys_orca.model.layers import ACTIVATIONS

# The interpreter's, which is right to get infinity.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-2}
SHAPES = [("fp32", 3, 96), ("fp32", 1, 1027), ("fp16", 1, 1), ("bf16", 2, 64)]


@pytest.mark.parametrize(("dtype", "num_tokens", "size"), SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_torchs(
    name: str, dtype: str, num_tokens: int, size: int, device: torch.device, generator: torch.Generator
) -> None:
    x = (torch.randn(num_tokens, size, generator=generator) * 3).to(device, DTYPES[dtype])
    expected = ACTIVATIONS[name](x.float())
    out = activate(x, activation=name)
    assert out is x
    assert torch.allclose(out.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("dtype", "num_tokens", "size"), SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_multiply_what_passes_them(
    name: str, dtype: str, num_tokens: int, size: int, device: torch.device, generator: torch.Generator
) -> None:
    x = (torch.randn(num_tokens, 2 * size, generator=generator) * 3).to(device, DTYPES[dtype])
    gate, up = x.float().chunk(2, dim=-1)
    out = gated(x, activation=name)
    assert out.shape == (num_tokens, size)
    expected = ACTIVATIONS[name](gate) * up
    assert torch.allclose(out.float(), expected, atol=3 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_inputs_stay_finite(name: str, device: torch.device) -> None:
    x = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    assert torch.allclose(activate(x.clone(), activation=name), ACTIVATIONS[name](x), atol=1e-6)
