"""Readers of one place's part of a model: no more of a file is read, and no more is held.

Between a checkpoint, which knows the whole model's tensors, and the families, which build a smaller model from what
stands here: fewer layers, heads, features and tokens under the names of a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.family import Family
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import Arrange, OperatorReader
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout
from mlsys_orca.model.weights.quantized import Matrix, QuantizedMatrix
from mlsys_orca.parallel.cuts import Source, sources
from mlsys_orca.parallel.placement import Placement, shard_config


class PartCheckpoint:
    """The tensors of a part under the names they have in it; a :class:`Checkpoint`.

    Args:
        file: The whole model's tensors.
        found: Tensors of the part, by name.
    """

    def __init__(self, file: Checkpoint, found: Mapping[str, Source]) -> None:
        self.layout: Layout = file.layout
        self._file = file
        self._sources = found

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the part."""
        source = self._sources[name]
        whole = self._file.shape(source.name)
        return whole if source.cut is None or source.cut.axis >= len(whole) else source.cut.shape(whole)

    def nbytes(self, name: str) -> int:
        """Return the bytes that the part takes in the file."""
        source = self._sources[name]
        return self._file.nbytes(source.name) * prod(self.shape(name)) // max(1, prod(self._file.shape(source.name)))

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Write the values of the part into ``out``."""
        assert cut is None, "a part is not cut again"
        source = self._sources[name]
        self._file.read_into(source.name, out, source.cut)

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return the codes and scales of the part, if the file has them."""
        assert cut is None, "a part is not cut again"
        source = self._sources[name]
        return self._file.quantized(source.name, source.cut)


class PartReader(OperatorReader):
    """Reader of one part's operators: a stage that embeds nothing has no table, one that is not the last no head."""

    def __init__(self, *args: Any, placement: Placement, **options: Any) -> None:
        super().__init__(*args, **options)
        self._placement = placement

    def tensor(
        self, role: str, shape: tuple[int, ...], *, at: tuple[int, ...] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read the weight of that role, but learned positions only where tokens are embedded."""
        if role == "positions" and not self._placement.is_first:
            return torch.empty((0, *shape[1:]))
        return super().tensor(role, shape, at=at, dtype=dtype)

    def matrix(
        self,
        rows: Mapping[str, int],
        columns: int,
        *,
        at: tuple[int, ...] = (),
        arrange: Mapping[str, Arrange] | None = None,
    ) -> Matrix:
        """Read the weights of several roles; an embedding's table only where it is used."""
        if any(role.endswith("embedding") and not self.has(role) for role in rows):
            return torch.empty(0, columns, dtype=self.dtype)
        return super().matrix(rows, columns, at=at, arrange=arrange)

    def head(self, table: Matrix, *, tied: bool, bias: bool = False) -> Linear:
        """Read this part's rows of the vocabulary projection; none but in the last stage."""
        if not self._placement.is_last:
            return Linear(torch.empty(0, table.shape[1], dtype=self.dtype))
        if tied:
            return super().head(table, tied=True, bias=bias)
        return self.linear({"head": self._num_head_rows}, table.shape[1], bias=bias)

    @property
    def _num_head_rows(self) -> int:
        return self._reader.checkpoint.shape(self._name("head", (), "weight"))[0]


LoadPart = Callable[..., DecoderModel]


def load_part(
    family: Family, whole: ModelConfig, checkpoint: Checkpoint, *, placement: Placement, **options: Any
) -> DecoderModel:
    """Read the part of a model at ``placement``.

    Args:
        family: The model's.
        whole: Its configuration.
        checkpoint: The whole model's tensors, of which no more than the part is read.
        placement: The part's place.
        options: Those of :meth:`Family.load`.

    Raises:
        InvalidInputError: the model does not divide so, or as :meth:`Family.load`.
    """
    found = sources(family, whole, placement, checkpoint.names, checkpoint.layout)
    read_by = partial(PartReader, placement=placement)
    return family.load(shard_config(whole, placement), PartCheckpoint(checkpoint, found), read_by=read_by, **options)
