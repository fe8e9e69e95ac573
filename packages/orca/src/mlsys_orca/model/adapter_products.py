"""The products of a decoder, or of part of one, that LoRA adapters change, and what an adapter adds to each.

Below :mod:`.adapters`, which reads adapters and fits them to these products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.blocks import MLP, Attention, Decoder, GatedMLP, RotatedBy
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.families import model_family
from mlsys_orca.model.weights.checkpoint import Cut
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
class AdapterPlace:
    """Part of a model whose products an adapter changes; by default all of it."""

    first_layer: int = 0  # of the part, numbered as in the whole model
    num_layers: int | None = None  # of the whole model; None: as many as the part has
    num_ranks: int = 1  # parts that a layer is divided in
    cut: Callable[[str], Cut | None] = lambda _: None  # role -> this part's rows or columns of the whole weight


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A product, or some of its columns, that adapters know by one name."""

    linear: AdaptedLinear
    column: int  # the first
    columns: int
    cut: Cut | None
    num_ranks: int
    num_heads: int | None = None  # whose query, key and value rows stand together in files; None: all queries first

    def part(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this part of the model has of A [rank, in_features] and B [rows, rank], in the model's order."""
        if self.cut is not None:
            pick = torch.cat([torch.arange(each.start, each.stop) for each in self.cut.ranges])
            down, up = (down, up[pick]) if self.cut.axis == 0 else (down[:, pick], up)
        if self.num_heads is not None:
            up = up.view(self.num_heads, 3, -1, up.shape[1]).transpose(0, 1).reshape(up.shape)
        return down, up

    def whole_shape(self) -> tuple[int, int]:
        """Return (rows, in_features) of the whole model's product."""
        rows, features = self.columns, _in_features(self.linear.base)
        if self.cut is None:
            return rows, features
        return (rows * self.num_ranks, features) if self.cut.axis == 0 else (rows, features * self.num_ranks)


def adapted_products(decoder: Decoder, rows: AdapterRows, place: AdapterPlace) -> dict[str, AdaptedProduct | None]:
    """Return every product that adapters know, by its module's name in Hugging Face's layout.

    None stands for one in another part of the model.
    """
    family = model_family(decoder.config.architecture)
    stems, by_head = family.stems["huggingface"], "huggingface" in family.qkv_by_head
    found: dict[str, AdaptedProduct | None] = {}

    def add(role: str, index: int, linear: AdaptedLinear, column: int, columns: int) -> None:
        for layer in range(place.num_layers or 0):
            found.setdefault(stems[role].format(layer), None)
        name = stems[role].format(index + place.first_layer)
        num_heads = decoder.config.num_heads if by_head and role == "qkv" else None
        found[name] = AdaptedProduct(linear, column, columns, place.cut(role), place.num_ranks, num_heads)

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


def _in_features(linear: nn.Module) -> int:
    features: Any = linear.in_features
    return int(features)
