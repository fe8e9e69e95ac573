"""Read the weights of a Hugging Face directory: one safetensors file, or shards with their index.

First stage of loading such a directory, as :mod:`mlsys_orca.model.weights.gguf_file` is of a GGUF.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.weights.checkpoint import Cut, Layout
from mlsys_orca.model.weights.damage import MAX_INDEX_NBYTES, inside, json_object, readable
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes per value


class SafetensorsDirectory:
    """The tensors of one model; a :class:`~mlsys_orca.model.weights.checkpoint.Checkpoint`.

    Args:
        path: The directory.

    Raises:
        InvalidInputError: it holds no safetensors weights (pickle is refused), a shard is missing, damaged, or lacks a
            tensor of the index.
    """

    layout: Layout = "huggingface"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {name: _open(path / name) for name in _shard_names(path)}
        self._file_of: dict[str, Any] = {}
        for shard, file in self._files.items():
            for tensor in file.keys():  # noqa: SIM118
                if tensor in self._file_of:
                    raise InvalidInputError(f"{path}: the tensor {tensor[:100]!r} is in {shard} and in another shard")
                self._file_of[tensor] = file
        if missing := sorted(set(_indexed_names(path)) - set(self._file_of)):
            raise InvalidInputError(f"{path}: the shards lack {missing[0]!r} of {INDEX_FILE}; download them again")

    @property
    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def nbytes(self, name: str) -> int:
        """Return the tensor's size in the file, in bytes."""
        part = self._slice(name)
        return int(torch.Size(part.get_shape()).numel()) * _DTYPES.get(part.get_dtype(), 1)

    def read_into(self, name: str, out: Tensor, cut: Cut | None = None) -> None:
        """Copy the tensor, or part of it, into ``out``, cast to its dtype. Of a part no more is read.

        Raises:
            InvalidInputError: it is of no plain floating type.
        """
        if (dtype := self._slice(name).get_dtype()) not in _DTYPES:
            raise InvalidInputError(
                f"{self.path}: tensor {name!r} is of type {dtype}; {', '.join(_DTYPES)} are supported. "
                "For quantised weights use a GGUF file"
            )
        if cut is None:
            out.copy_(self._file_of[name].get_tensor(name))
            return
        start = 0
        for each in cut.ranges:
            index = (*(slice(None) for _ in range(cut.axis)), slice(each.start, each.stop))
            out.narrow(cut.axis, start, len(each)).copy_(self._slice(name)[index])
            start += len(each)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor as the file has it.

        Raises:
            InvalidInputError: there is none.
        """
        if name not in self._file_of:
            raise InvalidInputError(f"{self.path}: there is no tensor {name[:100]!r} beside those it belongs to")
        found: Tensor = self._file_of[name].get_tensor(name)
        return found

    def quantized(self, name: str, cut: Cut | None = None) -> None:
        """Return None: the quantised weights that these files may have are not read."""

    def _slice(self, name: str) -> Any:
        return self._file_of[name].get_slice(name)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise InvalidInputError(f"{path} is missing; the model needs every file that {INDEX_FILE} names")
    with readable(path):
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise InvalidInputError(
                f"{path} is truncated or no safetensors file ({error}); download it again"
            ) from error


def _indexed_names(path: Path) -> dict[str, str]:
    """Return file names by tensor name, as the index says; empty without an index."""
    if not (path / INDEX_FILE).is_file():
        return {}
    weight_map = json_object(path / INDEX_FILE, max_nbytes=MAX_INDEX_NBYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InvalidInputError(f"{path / INDEX_FILE} is no index of shards: it has no weight_map of file names")
    return weight_map


def _shard_names(path: Path) -> list[str]:
    if shards := sorted(set(_indexed_names(path).values())):
        for name in shards:
            if inside(path, name).parent != path or name in ("", "."):
                raise InvalidInputError(
                    f"{path / INDEX_FILE} names {name[:100]!r}, which is not a file of its directory"
                )
        return shards
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if pickles := sorted(file.name for file in path.glob("*.bin")):
        raise InvalidInputError(
            f"{path} has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded. Convert it "
            "where you trust it: model.save_pretrained(directory) with transformers writes safetensors"
        )
    raise InvalidInputError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
