import pytest
import torch
from mlsys_orca.backends.triton.rowwise import add_norm
from torch import Tensor
from torch.nn import functional

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "size"), [("fp32", 3, 64), ("fp32", 1, 1025), ("fp16", 1, 100), ("bf16", 2, 64)]
)
@pytest.mark.parametrize("has_branch", [False, True], ids=["alone", "after-addition"])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer-without-weights"])
def test_a_sum_is_kept_and_normalised(
    kind: str,
    has_branch: bool,
    dtype: str,
    num_tokens: int,
    size: int,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x, branch = normal(num_tokens, size) * 3 + 1, normal(num_tokens, size).to(DTYPES[dtype]) if has_branch else None
    weight, bias = (None, None) if "without" in kind else (normal(size), normal(size) if kind == "layer" else None)
    expected_sum = x if branch is None else x + branch
    if kind == "rms":
        expected = functional.rms_norm(expected_sum, (size,), weight, 1e-5)
    else:
        expected = functional.layer_norm(expected_sum, (size,), weight, bias, 1e-5)
    out = add_norm(x, branch, weight=weight, bias=bias, eps=1e-5, is_centred=kind != "rms", dtype=DTYPES[dtype])
    assert torch.equal(x, expected_sum)
    assert out.dtype == DTYPES[dtype]
    assert torch.allclose(out.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_row_is_normalised_alike_alone_and_among_others(device: torch.device, generator: torch.Generator) -> None:
    x, weight = torch.randn(7, 96, generator=generator).to(device), torch.randn(96, generator=generator).to(device)
    options = {"weight": weight, "eps": 1e-6, "is_centred": False, "dtype": torch.float32}
    together = add_norm(x, None, **options)
    assert all(torch.equal(add_norm(x[i : i + 1], None, **options)[0], together[i]) for i in range(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_the_models_dtype_are_normalised_too(dtype: str, device: torch.device) -> None:
    x = torch.arange(1.0, 33.0, device=device).view(1, 32).to(DTYPES[dtype])
    out = add_norm(x, None, weight=None, eps=0.0, is_centred=False, dtype=torch.float32)
    assert torch.allclose(out, functional.rms_norm(x.float(), (32,)), atol=1e-6)
