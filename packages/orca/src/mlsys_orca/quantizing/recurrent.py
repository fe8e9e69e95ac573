"""Directories with recurrent layers under the names and cuts of GGUF, which has apart what they have as one product.

Used by :mod:`.huggingface`. A directory of Granite 4 has gates and ups as one tensor, one of Qwen3-Next the queries,
keys, values and gates of a delta net, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.states import RecurrentPart
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout
from mlsys_orca.model.weights.quantized import QuantizedMatrix


class CutDirectory:
    """The tensors of a directory with recurrent layers, some cut; a :class:`Checkpoint`.

    Args:
        whole: The directory.
        config: Its model, which has recurrent layers.

    Raises:
        InvalidInputError: a tensor has another shape than the configuration implies.
    """

    def __init__(self, whole: Checkpoint, config: ModelConfig) -> None:
        self.layout: Layout = whole.layout
        self._whole = whole
        self._parts = {own: (name, cut) for name in whole.names for own, cut in _parts(name, whole, config)}

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape, outermost dimension first."""
        source, cut = self._parts[name]
        whole = self._whole.shape(source)
        return whole if cut is None else cut.shape(whole)

    def nbytes(self, name: str) -> int:
        """Return the size in the file, in bytes, of what the tensor is cut from."""
        return self._whole.nbytes(self._parts[name][0])

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Copy the tensor, or part of it, into ``out``, contiguous, cast to its dtype."""
        source, own = self._parts[name]
        if own is None or cut is None:
            self._whole.read_into(source, out, own or cut)
            return
        all_of_it = torch.empty(self.shape(name), dtype=out.dtype)
        self._whole.read_into(source, all_of_it, own)
        wanted = torch.cat([torch.arange(part.start, part.stop) for part in cut.ranges])
        out.copy_(all_of_it.index_select(cut.axis, wanted))

    def quantized(self, name: str, cut: Cut | None = None) -> QuantizedMatrix | None:
        """Return None: what is written is read as numbers."""
        del name, cut
        return None


def _parts(name: str, whole: Checkpoint, config: ModelConfig) -> Iterator[tuple[str, Cut | None]]:
    """Yield the tensors that GGUF makes of tensor ``name``, under names that the ``gguf`` library knows."""
    stem, _, last = name.rpartition(".")
    layer = stem.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
    shared = f"{layer}.mlp" + (".shared_expert" if config.num_experts else "")
    part = config.recurrent
    assert part is not None
    if last == "dt_bias":
        yield f"{stem}.dt_proj.bias", None
    elif name.endswith(".router.layer.weight"):
        yield f"{layer}.mlp.gate.weight", None
    elif name.endswith(".output_linear.weight"):
        yield (f"{layer}.mlp.experts" if "block_sparse_moe" in name else shared) + ".down_proj.weight", None
    elif name.endswith(".input_linear.weight"):
        axis, mlp = (1, f"{layer}.mlp.experts") if "block_sparse_moe" in name else (0, shared)
        half = whole.shape(name)[axis] // 2
        yield f"{mlp}.gate_proj.weight", Cut(axis, (range(half),))
        yield f"{mlp}.up_proj.weight", Cut(axis, (range(half, 2 * half),))
    elif name.endswith(".in_proj_qkvz.weight"):
        if whole.shape(name)[0] != part.num_channels + part.num_values:
            raise InvalidInputError(f"{name!r} has {whole.shape(name)[0]} rows, other than the configuration implies")
        queries, keys, values, gates = _of_groups(part)
        yield f"{stem.removesuffix('_qkvz')}_qkv.weight", Cut(0, (*queries, *keys, *values))
        yield f"{stem.removesuffix('_qkvz')}_z.weight", Cut(0, tuple(gates))
    else:
        yield name, None


def _of_groups(part: RecurrentPart) -> list[list[range]]:
    """Return the rows of each group's query, key, values and gates, kind by kind."""
    width = part.num_values // part.num_groups
    sizes, whole = (part.state_size, part.state_size, width, width), 2 * (part.state_size + width)
    starts = [sum(sizes[:kind]) for kind in range(4)]
    return [
        [range(whole * group + start, whole * group + start + size) for group in range(part.num_groups)]
        for start, size in zip(starts, sizes, strict=True)
    ]
