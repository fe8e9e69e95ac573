"""Mixes of types, by hand from what llama.cpp's quantiser documents."""

from __future__ import annotations

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_gguf_tools.types import Mix, file_type


def mix(kind: str, **changes: object) -> Mix:
    options: dict[str, object] = {"num_layers": 32, "num_experts": 0, "has_head": True}
    return Mix(file_type=file_type(kind), **(options | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("Q4_K_M", "output.weight", "Q6_K"),
        ("Q4_K_M", "token_embd.weight", "Q4_K"),
        ("Q4_K_M", "blk.0.attn_q.weight", "Q4_K"),
        ("Q4_K_M", "blk.0.attn_norm.weight", "F32"),
        ("Q4_K_M", "blk.0.attn_q.bias", "F32"),
        ("Q4_K_M", "blk.0.ffn_gate_inp.weight", "F32"),
        ("Q4_K_M", "blk.0.attn_qkv.weight", "Q5_K"),
        ("Q5_K_M", "blk.0.attn_qkv.weight", "Q6_K"),
        ("Q5_K_M", "blk.31.ffn_down.weight", "Q6_K"),
        ("Q4_K_S", "blk.3.attn_v.weight", "Q5_K"),
        ("Q4_K_S", "blk.4.attn_v.weight", "Q4_K"),
        ("Q4_K_S", "blk.3.ffn_down.weight", "Q5_K"),
        ("Q4_K_S", "blk.31.ffn_down.weight", "Q4_K"),
        ("Q4_0", "output.weight", "Q6_K"),
        ("Q4_0", "blk.0.ffn_down.weight", "Q4_0"),
        ("Q8_0", "output.weight", "Q8_0"),
        ("F16", "output.weight", "F16"),
    ],
)
def test_types_of_a_llama(kind: str, name: str, expected: str) -> None:
    shape = (256,) if "norm" in name or "bias" in name else (256, 512)
    assert mix(kind).of(name, shape).name == expected


def test_the_layers_with_more_bits() -> None:
    found = [mix("Q4_K_M").of(f"blk.{i}.attn_v.weight", (256, 256)).name for i in range(32)]
    assert [i for i, name in enumerate(found) if name == "Q6_K"] == [0, 1, 2, 3, *range(6, 28, 3), 28, 29, 30, 31]


@pytest.mark.parametrize(
    ("name", "columns", "expected"),
    [
        ("blk.2.attn_q.weight", 576, "Q5_0"),  # 256 does not divide it, 32 does
        ("blk.0.attn_v.weight", 576, "Q8_0"),
        ("blk.2.attn_q.weight", 100, "F16"),
    ],
)
def test_rows_that_no_super_block_divides(name: str, columns: int, expected: str) -> None:
    assert mix("Q4_K_M").of(name, (64, columns)).name == expected


def test_a_table_that_is_also_the_head_gets_the_heads_bits() -> None:
    assert mix("Q4_K_M", has_head=False).of("token_embd.weight", (64, 256)).name == "Q6_K"
    assert mix("Q4_K_M", num_experts=8).of("blk.9.attn_k.weight", (64, 256)).name == "Q8_0"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="IQ2_XXS"):
        file_type("IQ2_XXS")
