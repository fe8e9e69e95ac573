"""The products of a decoder that LoRA adapters change, and what an adapter adds to each.

Below :mod:`.adapters`, which reads adapters and fits them to these products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.blocks import MLP, Attention, Decoder, GatedMLP, RotatedBy
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.families import model_family
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank update of one product, or of some of its columns."""

    down: Tensor  # A: [rank, in_features]
    up: Tensor  # scale * B: [rows, rank]


@dataclass(slots=True)
class AdapterRows:
    """Rows of the current batch by adapter name; set before each forward."""

    by_adapter: dict[str, Tensor] = field(default_factory=dict)  # key -> int64 [rows]


class AdaptedLinear(nn.Module):
    """A product, with adapters' on the rows of their requests.

    Args:
        base: The model's product.
        rows: Row indices by adapter name.
    """

    def __init__(self, base: nn.Module, rows: AdapterRows) -> None:
        super().__init__()
        self.base = base
        self._rows = rows
        self.parts: dict[str, list[tuple[int, LowRank]]] = {}  # key -> (first column, what is added there)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [num_tokens, in_features] and add the adapters' updates -> [num_tokens, out_features]."""
        out: Tensor = self.base(x)
        for name, rows in self._rows.by_adapter.items():
            for column, part in self.parts.get(name, ()):
                added = x[rows] @ part.down.T @ part.up.T
                out[:, column : column + len(part.up)].index_add_(0, rows, added.to(out.dtype))
        return out


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A product, or some of its columns, that adapters know by one name."""

    linear: AdaptedLinear
    column: int  # the first
    columns: int

    def whole_shape(self) -> tuple[int, int]:
        """Return (rows, in_features) of the product."""
        features: Any = self.linear.base.in_features
        return self.columns, int(features)


def adapted_products(decoder: Decoder, rows: AdapterRows) -> dict[str, AdaptedProduct]:
    """Return every product that adapters know, by its module's name in Hugging Face's layout."""
    family = model_family(decoder.config.architecture)
    stems = family.stems["huggingface"]
    found: dict[str, AdaptedProduct] = {}

    def add(role: str, index: int, linear: AdaptedLinear, column: int, columns: int) -> None:
        found[stems[role].format(index)] = AdaptedProduct(linear, column, columns)

    for index, layer in enumerate(decoder.layers):
        for owner, name, parts in _linears(layer, decoder.config):
            adapted = AdaptedLinear(getattr(owner, name), rows)
            setattr(owner, name, adapted)
            whole = "_".join(parts)  # of families whose files have one matrix for several: "qkv", "gate_up"
            whole = {"q_k_v": "qkv"}.get(whole, whole)
            if whole in stems and len(parts) > 1:
                add(whole, index, adapted, 0, sum(parts.values()))
                continue
            column = 0
            for part, size in parts.items():
                if part in stems:
                    add(part, index, adapted, column, size)
                column += size
    return found


def _linears(layer: nn.Module, config: ModelConfig) -> Iterator[tuple[nn.Module, str, dict[str, int]]]:
    """Yield (module, attribute, sizes of its column groups by name) for each product of ``layer``."""
    attention: Any = getattr(layer, "attention", None)
    if isinstance(attention, RotatedBy):
        attention = attention.attention
    mlp: Any = getattr(layer, "mlp", None)
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP | MLP):
        raise InvalidInputError(f"adapters do not fit a {type(layer).__name__} of {config.architecture}")
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield attention, "qkv", {"q": queries, "k": keys, "v": keys}
    yield attention, "output", {"o": config.hidden_size}
    inner = config.intermediate_size
    if isinstance(mlp, GatedMLP):
        yield mlp, "gate_up", {"gate": inner, "up": inner}
    else:
        yield mlp, "up", {"up": inner}
    yield mlp, "down", {"down": config.hidden_size}
