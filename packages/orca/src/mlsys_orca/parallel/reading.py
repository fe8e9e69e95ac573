"""Readers of one place's part of a model: no more of a file is read, and no more is held.

Between a checkpoint, which knows the whole model's tensors, and the families, which build a smaller model from what
stands here: fewer layers, heads, features and tokens under the names of a whole one. The part's layers count from 0;
:func:`sources` finds the tensors that it asks for in the whole model's file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.family import Family
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import Arrange, OperatorReader
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout, Source, View
from mlsys_orca.model.weights.quantized import Matrix
from mlsys_orca.parallel.placement import Placement, shard_config

if TYPE_CHECKING:
    from mlsys_orca.model.family import Family


_BY_HEADS = {"q", "k", "v"}
_BY_FEATURES = {"gate", "gated", "up"}


def sources(
    family: Family, whole: ModelConfig, placement: Placement, names: Collection[str], layout: Layout
) -> dict[str, Source]:
    """Return where each tensor of the part comes from, by the name that it has in the part.

    Tensors that no role names keep their names: whoever sees that all of a file is read will name them.

    Args:
        family: The model's.
        whole: Its configuration.
        placement: The part's place.
        names: Tensors of the file.
        layout: The file's.
    """
    stems = family.stems[layout]
    first = stems["embedding"].partition(".")[0] + "."
    prefix = "" if layout == "gguf" or any(name.startswith(first) for name in names) else first
    head = stems.get("head")
    is_tied = whole.tied_embeddings or (head is not None and f"{head.removeprefix(prefix)}.weight" not in names)
    found: dict[str, Source] = {}
    known: set[str] = set()
    # "gate_up" after "up", which a GGUF may call the same.
    for role, stem in sorted(stems.items(), key=lambda item: item[0].endswith("gate_up")):
        for at, own in _numbers(stem, whole, placement):
            for part in ("weight", "bias", ""):  # some names end with their stem
                name = f"{stem.format(*at)}.{part}".removeprefix(prefix).removesuffix(".")
                if name not in names:
                    continue
                known.add(name)
                if own is not None and _is_needed(role, placement, is_tied=is_tied):
                    is_transposed = layout in family.transposed and "{}" in stem
                    cut = cut_of(role, part, whole, placement, is_transposed=is_transposed)
                    found[f"{stem.format(*own)}.{part}".removeprefix(prefix).removesuffix(".")] = Source(name, cut)
    return found | {name: Source(name, None) for name in set(names) - known - found.keys()}


def _numbers(
    stem: str, whole: ModelConfig, placement: Placement
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Yield the numbers of each layer (and expert) in the file, and in the part; None: they are in another part."""
    if "{}" not in stem:
        yield (), ()
        return
    own = placement.layers(whole)
    for layer in range(whole.num_layers):
        here = layer - own.start if layer in own else None
        if stem.count("{}") == 1:
            yield (layer,), None if here is None else (here,)
            continue
        for expert in range(whole.num_experts):
            yield (layer, expert), None if here is None else (here, expert)


def _is_needed(role: str, placement: Placement, *, is_tied: bool) -> bool:
    match role:
        case "embedding":
            return placement.is_first or (placement.is_last and is_tied)
        case "head":
            return placement.is_last
        case "positions":
            return placement.is_first
    return True


def cut_of(role: str, part: str, whole: ModelConfig, placement: Placement, *, is_transposed: bool) -> Cut | None:
    """Return the part of a tensor that a rank has; None: all of it."""
    if placement.num_ranks == 1:
        return None
    last = role.rpartition(".")[2]
    queries, keys = (
        _scaled(placement.share(number), whole.head_dim) for number in (whole.num_heads, whole.num_kv_heads)
    )
    inner = placement.share(whole.intermediate_size)
    rows, columns = (1, 0) if is_transposed else (0, 1)
    if part == "bias":
        rows = 0
    if last in ("embedding", "head"):
        return Cut(0, (placement.vocabulary(whole),))
    if last in _BY_HEADS:
        return Cut(rows, (queries if last == "q" else keys,))
    if last in ("q_norms", "k_norms"):  # [heads, head_dim]
        return Cut(0, (placement.share(whole.num_heads if last == "q_norms" else whole.num_kv_heads),))
    if last == "qkv":
        q_rows, kv_rows = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        return Cut(rows, (queries, _shifted(keys, q_rows), _shifted(keys, q_rows + kv_rows)))
    if last in _BY_FEATURES:
        return Cut(rows, (inner,))
    if last == "gate_up":
        return Cut(rows, (inner, _shifted(inner, whole.intermediate_size)))
    if last in ("gates", "ups"):  # [experts, features, hidden_size]
        return Cut(1, (inner,))
    if last == "downs":
        return Cut(2, (inner,))
    if part == "bias":
        return None  # of a sum over ranks: added once, after it
    if last == "o":
        return Cut(columns, (queries,))
    return Cut(columns, (inner,)) if last == "down" else None


def _scaled(heads: range, size: int) -> range:
    return range(heads.start * size, heads.stop * size)


def _shifted(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)


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

    def head(self, table: Matrix, *, tied: bool) -> Linear:
        """Read this part's rows of the vocabulary projection; none but in the last stage."""
        if not self._placement.is_last:
            return Linear(torch.empty(0, table.shape[1], dtype=self.dtype))
        if tied:
            return super().head(table, tied=True)
        return self.linear({"head": self._num_head_rows}, table.shape[1])

    @property
    def _num_head_rows(self) -> int:
        return self._reader.checkpoint.shape(self._name("head", (), "weight"))[0]


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
    return family.load(shard_config(whole, placement), View(checkpoint, found), read_by=read_by, **options)
