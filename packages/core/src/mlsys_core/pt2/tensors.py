"""Weights and constants of a ``.pt2`` file, from their raw bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.archive import Archive

if TYPE_CHECKING:
    from torch import Tensor

_STRIDED = 7  # schema.Layout.Strided
_MAX_DIMENSIONS = 64


def read_tensors(archive: Archive, folder: str, payloads: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors by name; those of one member share its memory, as they did when they were saved.

    Args:
        archive: The file.
        folder: ``data/weights`` or ``data/constants``.
        payloads: ``torch._export.serde.schema.PayloadMeta`` by name.

    Raises:
        InvalidInputError: one is kept as a pickle, or reaches past its bytes.
    """
    from torch import nn

    storages: dict[tuple[str, int], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, payload in payloads.items():
        meta = payload.tensor_meta
        if payload.use_pickle or meta is None:
            raise archive.damaged(f"{name} is kept as a pickle, which can run any code when it is loaded")
        key = (payload.path_name, int(meta.dtype))
        if key not in storages:
            storages[key] = _storage(archive, f"{folder}/{payload.path_name}", meta)
        try:
            tensor = _view(storages[key], meta)
        except (InvalidInputError, RuntimeError, TypeError) as error:
            raise archive.damaged(f"{name}: {str(error).splitlines()[0]}") from error
        tensors[name] = nn.Parameter(tensor, requires_grad=meta.requires_grad) if payload.is_param else tensor
    return tensors


def _storage(archive: Archive, name: str, meta: Any) -> Tensor:
    """Return a member's bytes as a tensor of one dimension, on its device."""
    import torch
    from torch._export.serde.serialize import deserialize_device, deserialize_scalar_type

    dtype = deserialize_scalar_type(meta.dtype)
    size = torch.empty((), dtype=dtype).element_size()
    content = bytearray(archive.read(name))
    if len(content) % size:
        raise archive.damaged(f"{name} has {len(content)} bytes, no multiple of {size} ({dtype})")
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    device = deserialize_device(meta.device)
    return flat if device.type == "cpu" else flat.to(device)


def _view(storage: Tensor, meta: Any) -> Tensor:
    """Return the part of ``storage`` that ``meta`` describes, within its bounds."""
    if meta.layout != _STRIDED:
        raise InvalidInputError(f"it is of layout {meta.layout}, not strided")
    sizes, strides = _numbers(meta.sizes), _numbers(meta.strides)
    (offset,) = _numbers([meta.storage_offset])
    if len(sizes) != len(strides) or len(sizes) > _MAX_DIMENSIONS:
        raise InvalidInputError(f"{len(sizes)} sizes and {len(strides)} strides")
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= storage.numel():
        raise InvalidInputError(f"shape {sizes} from {offset} on reaches past its {storage.numel()} elements")
    if 0 in sizes:
        return storage.new_empty(sizes)
    return storage.as_strided(sizes, strides, offset)


def _numbers(values: list[Any]) -> list[int]:
    if any(value.type != "as_int" or value.as_int < 0 for value in values):
        raise InvalidInputError("its sizes are no numbers")
    return [value.as_int for value in values]
