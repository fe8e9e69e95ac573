"""Reads a model's operators from a checkpoint by what they are for, whatever the layout calls their tensors.

Between :class:`~mlsys_orca.loading.weights.WeightReader`, which knows names and shapes, and the families, which say
"the query, key and value projections of layer 3, as one product".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlsys_orca.loading.checkpoint import Layout
from mlsys_orca.loading.weights import WeightReader
from mlsys_orca.models.layers import LayerNorm, Linear, RMSNorm

Arrange = Callable[[Tensor], Tensor]  # rows of a weight or bias, in the file's order -> in the model's


class OperatorReader:
    """Reads operators of one model.

    Args:
        reader: The open checkpoint.
        stems: Role -> tensor name without its ``.weight`` or ``.bias``; ``{}`` stands for the layer's number.
        dtype: Of the weights that go into products.
        device: Where to put them.
        eps: Of every norm.
    """

    def __init__(
        self, reader: WeightReader, stems: Mapping[str, str], *, dtype: torch.dtype, device: torch.device, eps: float
    ) -> None:
        self.layout: Layout = reader.checkpoint.layout
        self.dtype = dtype
        self.device = device
        self._reader = reader
        self._stems = stems
        self._eps = eps
        # Some directories hold the bare decoder, whose names lack the first part ("model.", "transformer.").
        first = stems["embedding"].partition(".")[0] + "."
        named = any(name.startswith(first) for name in reader.checkpoint.names)
        self._absent_prefix = "" if named or self.layout == "gguf" else first

    def tensor(
        self, role: str, shape: tuple[int, ...], *, at: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """The weight of that role.

        Args:
            role: A key of the stems.
            shape: What the configuration implies.
            at: The layer's number, and the expert's.
            dtype: None: that of products.
        """
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._reader.read_into(self._name(role, at, "weight"), out)
        return out

    def matrix(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        at: tuple[int, ...] = (),
        arrange: Mapping[str, Arrange] | None = None,
    ) -> Tensor:
        """The weights of several roles, one below the other: [sum of rows, columns].

        Args:
            rows: Role -> how many rows it has.
            columns: Features that go in.
            at: The layer's number, and the expert's.
            arrange: Role -> how to bring its rows into this model's order.
        """
        fused = torch.empty(sum(rows.values()), columns, dtype=self.dtype, device=self.device)
        self._fill(fused, rows, at, "weight", arrange or {})
        return fused

    def linear(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        at: tuple[int, ...] = (),
        bias: bool = False,
        arrange: Mapping[str, Arrange] | None = None,
        transposed: bool = False,
    ) -> Linear:
        """One product for several projections, as :meth:`matrix`.

        Args:
            rows: Role -> how many rows it has.
            columns: Features that go in.
            at: The layer's number, and the expert's.
            bias: Whether each role has one.
            arrange: Role -> how to bring its rows, weight and bias, into this model's order.
            transposed: Whether the file has the weights as [in_features, out_features].
        """
        if transposed:
            weight = torch.cat([self.tensor(role, (columns, count), at=at).T for role, count in rows.items()])
        else:
            weight = self.matrix(rows, columns, at=at, arrange=arrange)
        shift = None
        if bias:
            shift = torch.empty(sum(rows.values()), dtype=self.dtype, device=self.device)
            self._fill(shift, rows, at, "bias", arrange or {})
        return Linear(weight.contiguous(), shift)

    def rms_norm(self, role: str, size: int, *, at: tuple[int, ...] = (), one_plus: bool = False) -> RMSNorm:
        """The norm of that role; ``one_plus`` where the file has its weight less one."""
        weight = self.tensor(role, (size,), at=at, dtype=torch.float32)
        return RMSNorm(weight + 1 if one_plus else weight, eps=self._eps, dtype=self.dtype)

    def layer_norm(
        self,
        role: str,
        size: int,
        *,
        at: tuple[int, ...] = (),
        affine: bool = True,
        dtype: torch.dtype | None = None,
    ) -> LayerNorm:
        """The norm of that role.

        Args:
            role: A key of the stems.
            size: Features of a row.
            at: The layer's number.
            affine: Whether the file has a weight and a bias for it.
            dtype: Of what it gives; None: that of products.
        """
        options: dict[str, Any] = {"hidden_size": size, "eps": self._eps, "dtype": dtype or self.dtype}
        if not affine:
            return LayerNorm(None, None, **options)
        weight = self.tensor(role, (size,), at=at, dtype=torch.float32)
        bias = torch.empty_like(weight)
        self._reader.read_into(self._name(role, at, "bias"), bias)
        return LayerNorm(weight, bias, **options)

    def head(self, table: Tensor, *, tied: bool) -> Linear:
        """The vocabulary projection, of the embedding table's shape.

        A tied one is packed anew: no row can be looked up in a packed table, and no product is fast in a plain one.
        """
        return Linear(table) if tied else self.linear({"head": table.shape[0]}, table.shape[1])

    def _name(self, role: str, at: tuple[int, ...], part: str) -> str:
        return f"{self._stems[role].format(*at)}.{part}".removeprefix(self._absent_prefix)

    def _fill(
        self, fused: Tensor, rows: Mapping[str, int], at: tuple[int, ...], part: str, arrange: Mapping[str, Arrange]
    ) -> None:
        for role, piece in zip(rows, torch.split(fused, list(rows.values())), strict=True):
            self._reader.read_into(self._name(role, at, part), piece)
            if role in arrange:
                piece.copy_(arrange[role](piece))
