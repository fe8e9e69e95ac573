"""Directories with recurrent layers under the names and cuts of GGUF, which has apart what they have as one product.

Used by :mod:`.huggingface`. A directory of Granite 4 has gates and ups as one tensor, one of Qwen3-Next the queries,
keys, values and gates of a delta net, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.config import ModelConfig, RecurrentPart
from mlsys_orca.model.weights.checkpoint import Checkpoint, Cut, Layout
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from torch import Tensor


class CutDirectory:
    """The tensors of a directory with recurrent layers, some cut; a :class:`Checkpoint`.

    Args:
        whole: The directory.
        config: Its model, which has recurrent layers.
        is_tiled: True where GGUF has heads in the order in which their keys repeat (Qwen3.5).

    Raises:
        InvalidInputError: a tensor has another shape than the configuration implies.
    """

    def __init__(self, whole: Checkpoint, config: ModelConfig, *, is_tiled: bool = False) -> None:
        self.layout: Layout = whole.layout
        self._whole = whole
        self._parts = {own: (name, cut) for name in whole.names for own, cut in _parts(name, whole, config, is_tiled)}

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


def _parts(name: str, whole: Checkpoint, config: ModelConfig, is_tiled: bool) -> Iterator[tuple[str, Cut | None]]:
    """Yield the tensors that GGUF makes of tensor ``name``, under names that the ``gguf`` library knows."""
    stem, _, last = name.rpartition(".")
    layer = stem.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
    shared = f"{layer}.mlp" + (".shared_expert" if config.num_experts else "")
    part = config.recurrent
    assert part is not None
    if last == "dt_bias":
        yield f"{stem}.dt_proj.bias", _tiled(name, part) if is_tiled else None
    elif last == "down_proj":  # of all experts
        yield f"{name}.weight", None
    elif last == "gate_up_proj":
        yield from _halves(f"{stem}.", 1, whole.shape(name))
    elif name.endswith(".router.layer.weight"):
        yield f"{layer}.mlp.gate.weight", None
    elif name.endswith(".output_linear.weight"):
        yield (f"{layer}.mlp.experts" if "block_sparse_moe" in name else shared) + ".down_proj.weight", None
    elif name.endswith(".input_linear.weight"):
        axis, mlp = (1, f"{layer}.mlp.experts") if "block_sparse_moe" in name else (0, shared)
        yield from _halves(f"{mlp}.", axis, whole.shape(name))
    elif name.endswith(".in_proj_qkvz.weight"):
        if whole.shape(name)[0] != part.num_channels + part.num_values:
            raise InvalidInputError(f"{name!r} has {whole.shape(name)[0]} rows, other than the configuration implies")
        queries, keys, values, gates = _of_groups(part)
        yield f"{stem.removesuffix('_qkvz')}_qkv.weight", Cut(0, (*queries, *keys, *values))
        yield f"{stem.removesuffix('_qkvz')}_z.weight", Cut(0, tuple(gates))
    elif ".linear_attn." in name and is_tiled:
        yield name, _tiled(name, part)
    else:
        yield name, None


def _halves(prefix: str, axis: int, shape: tuple[int, ...]) -> Iterator[tuple[str, Cut]]:
    half = shape[axis] // 2
    yield f"{prefix}gate_proj.weight", Cut(axis, (range(half),))
    yield f"{prefix}up_proj.weight", Cut(axis, (range(half, 2 * half),))


def _tiled(name: str, part: RecurrentPart) -> Cut | None:
    """Return the rows or columns of a tensor with heads in the order in which their keys repeat; None: it has none."""
    times = part.num_heads // part.num_groups
    heads = [head for first in range(times) for head in range(first, part.num_heads, times)]
    shared = 2 * part.num_groups * part.state_size

    def wide(start: int = 0) -> tuple[range, ...]:
        size = part.head_dim
        return tuple(range(start + head * size, start + (head + 1) * size) for head in heads)

    role = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
    match role:
        case "in_proj_qkv" | "conv1d":
            return Cut(0, (range(shared), *wide(shared)))
        case "in_proj_z":
            return Cut(0, wide())
        case "out_proj":
            return Cut(1, wide())
        case "in_proj_a" | "in_proj_b" | "A_log" | "dt_bias":
            return Cut(0, tuple(range(head, head + 1) for head in heads))
    return None


def _of_groups(part: RecurrentPart) -> list[list[range]]:
    """Return the rows of each group's query, key, values and gates, kind by kind."""
    width = part.num_values // part.num_groups
    sizes, whole = (part.state_size, part.state_size, width, width), 2 * (part.state_size + width)
    starts = [sum(sizes[:kind]) for kind in range(4)]
    return [
        [range(whole * group + start, whole * group + start + size) for group in range(part.num_groups)]
        for start, size in zip(starts, sizes, strict=True)
    ]
