"""A GGUF file as the source of another: metadata as it is, tensors dequantised, or copied where their type stays.

Called by :mod:`.writing`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.constants import GGMLQuantizationType, GGUFValueType
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Cut
from mlsys_orca.model.weights.gguf_blocks import check_types
from mlsys_orca.model.weights.gguf_file import GgufFile, TensorEntry
from torch import Tensor

from mlsys_gguf_tools.source import Entry, Source, SourceTensor

_REPLACED = frozenset({"general.file_type", "general.quantization_version"})
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def open_file(path: Path) -> Source:
    """Return the GGUF file ``path`` as a source.

    Raises:
        InvalidInputError: it is damaged, one part of several, or has tensors of a type that is not read.
    """
    file = GgufFile(path)  # sees that the header is sound
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidInputError(f"{path} names no general.architecture; is it a language model?")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise InvalidInputError(f"{path} is one part of several; join them first: llama-gguf-split --merge FIRST OUT")
    check_types(each.type for each in file.tensors.values())
    num_layers, num_experts = (file.metadata.get(f"{architecture}.{key}", 0) for key in ("block_count", "expert_count"))
    if type(num_layers) is not int or type(num_experts) is not int:
        raise InvalidInputError(f"{path} is damaged: its {architecture}.block_count is {str(num_layers)[:50]}")
    return Source(
        architecture,
        num_layers,
        num_experts,
        tuple(_entries(path)),
        tuple(_tensor(file, each) for each in file.tensors.values()),
        is_quantised=any(each.type not in _FLOATS for each in file.tensors.values()),
    )


def _entries(path: Path) -> list[Entry]:
    found = []
    for key, field in GGUFReader(path).fields.items():
        if key.startswith("GGUF.") or key in _REPLACED:
            continue
        kind, value = field.types[0], field.contents()
        if kind != GGUFValueType.ARRAY:
            found.append(Entry(key, value, kind))
        elif value:  # the library writes no empty lists
            found.append(Entry(key, value, kind, field.types[-1]))
    return found


def _tensor(file: GgufFile, given: TensorEntry) -> SourceTensor:
    return SourceTensor(
        given.name, given.shape, partial(_read, file, given), coded=(given.type, partial(file.data, given.name))
    )


def _read(file: GgufFile, given: TensorEntry, rows: range) -> Tensor:
    out = torch.empty((len(rows), *given.shape[1:]))
    file.read_into(given.name, out, None if len(rows) == given.shape[0] else Cut(0, (rows,)))
    return out
