import pytest
import torch
from mlsys_orca.backends.triton.rowwise import prepare_heads
from mlsys_orca.model.layers import RMSNorm, rotate
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 4e-2}
CASES = [  # dtype, query heads, key heads, head_dim, rotary_dim, whether heads are normalised
    ("fp32", 3, 3, 64, 64, False),
    ("fp32", 6, 2, 80, 80, False),
    ("fp32", 8, 1, 128, 128, True),
    ("fp32", 3, 1, 80, 20, False),
    ("fp32", 2, 2, 16, 8, True),
    ("fp32", 4, 2, 2, 2, False),
    ("fp32", 2, 2, 64, 0, False),
    ("fp32", 2, 1, 64, 0, True),
    ("fp16", 4, 2, 24, 24, True),
    ("bf16", 2, 1, 16, 16, True),
    ("bf16", 2, 2, 16, 8, False),
]
SLOTS = [5, 0, 17, 23, 4]  # of the 24 in the cache, for 5 tokens


def factors(rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors that layers.Rotary gives, for some positions."""
    positions = torch.tensor([0.0, 1.0, 5.0, 100.0, 31.0])
    angles = torch.outer(positions, 1 / 10_000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(device), torch.cat((-sin, sin), -1)[:, None].to(device)


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "has_norm"), CASES)
def test_heads_are_rotated_and_stored(
    dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_norm: bool,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    kind = DTYPES[dtype]
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(device, kind)
    weight = torch.randn(num_heads + num_kv_heads, head_dim, generator=generator).to(device)
    rotary = factors(rotary_dim, device) if rotary_dim else None
    expected = qkv[:, : num_heads + num_kv_heads]
    if has_norm:
        expected = RMSNorm(weight, eps=1e-5, dtype=kind)(expected)
    if rotary is not None:
        expected = rotate(expected, *rotary)
    before = torch.randn(2, 24, num_kv_heads, head_dim, generator=generator).to(device, kind)
    keys, values = before.clone()
    query = prepare_heads(
        qkv,
        keys,
        values,
        torch.tensor(SLOTS, device=device),
        num_heads=num_heads,
        rotary=rotary,
        norm_weight=weight if has_norm else None,
        eps=1e-5,
    )

    def close(ours: Tensor, theirs: Tensor) -> bool:
        return torch.allclose(ours.float(), theirs.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])

    assert query.dtype == kind
    assert close(query, expected[:, :num_heads])
    assert close(keys[SLOTS], expected[:, num_heads:])
    assert torch.equal(values[SLOTS], qkv[:, num_heads + num_kv_heads :])
    others = [slot for slot in range(24) if slot not in SLOTS]
    assert torch.equal(torch.stack((keys[others], values[others])), before[:, others])
