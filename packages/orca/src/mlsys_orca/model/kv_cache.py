"""Storage of attention's keys and values between iterations (ORCA's Attention K/V manager, section 3.2).

Two halves, on the two sides of the scheduler-runner boundary. :class:`BlockTables` is pure bookkeeping, owned by the
scheduler: it gives each request its blocks and takes them back. :class:`KVCache` owns the tensors, on the runner's
side, and knows slots only. A *slot* holds one token's key and value in every layer; a *block* is ``block_size``
adjacent slots. Block ids cross with each batch, so the two halves never talk otherwise.

Imports no torch by itself: a scheduler can use :class:`BlockTables` without it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_orca.scheduling.batch import BlockCopy
from mlsys_orca.scheduling.block_tables import DEFAULT_BLOCK_SIZE, BlockTables

if TYPE_CHECKING:
    import torch
    from mlsys_orca.model.config import ModelConfig, RecurrentPart
    from torch import Tensor

Empty = Callable[[tuple[int, ...], "torch.dtype"], "Tensor"]  # makes a tensor whose contents do not matter

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "BlockTables",
    "Empty",
    "KVCache",
    "RecurrentStates",
    "kv_dtype_name",
    "kv_nbytes_per_token",
    "shared_empty",
    "slots_of",
]

_KV_DTYPES = {  # as users write them -> as torch does
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "int8": "int8",
}
SCALE_NBYTES = 4  # of the scale that a head's key, or value, of one token has in int8


def shared_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor in memory that processes forked from this one share; pages not written to cost nothing."""
    import torch

    if 0 in shape:  # the keys of a model without attention: there is no memory to share
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)


def slots_of(block_table: tuple[int, ...], start: int, stop: int, *, block_size: int) -> range | list[int]:
    """Return the slots of positions ``start`` to ``stop - 1`` of a request; a range where they are adjacent.

    Raises:
        MemoryPlanError: the table is too short for ``stop`` tokens.

    Example:
        >>> slots_of((4, 5), 0, 6, block_size=4), slots_of((4, 9), 3, 6, block_size=4)
        (range(16, 22), [19, 36, 37])
    """
    first, last = start // block_size, -(-stop // block_size)
    blocks = block_table[first:last]
    if len(blocks) < last - first:
        raise MemoryPlanError(f"{len(block_table)} K/V blocks of {block_size} do not hold {stop} tokens")
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        shift = (blocks[0] - first) * block_size
        return range(start + shift, stop + shift)
    return [block_table[position // block_size] * block_size + position % block_size for position in range(start, stop)]


class KVCache:
    """Keys and values of all layers.

    Args:
        config: The model's shape.
        num_blocks: The same as of the scheduler's :class:`BlockTables`.
        block_size: The same as of the scheduler's :class:`BlockTables`.
        dtype: The model's.
        device: The model's.
        num_states: Slots for the states of a recurrent model's requests.
        empty: Makes a tensor of a shape and a dtype; None: as torch does.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_states: int = 1,
        empty: Empty | None = None,
    ) -> None:
        import torch

        self.num_blocks = num_blocks
        self.block_size = block_size
        # Not zeroed: attention reads only what write() has written, and an untouched page costs no memory on Linux.
        shape = (2, config.num_kv_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        made = torch.empty(shape, dtype=dtype, device=device) if empty is None else empty(shape, dtype)
        self._keys, self._values = made.unbind(0)
        self.states = None
        if config.recurrent is not None:
            self.states = RecurrentStates(config.recurrent, num_states=num_states, device=device, empty=empty)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, each [num_slots, num_kv_heads, head_dim]."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store this iteration's keys and values and return all of the layer's.

        Args:
            layer: The layer's number.
            slots: [num_tokens] int64, where each row goes.
            key: [num_tokens, num_kv_heads, head_dim], rotated.
            value: Like ``key``.

        Returns:
            The layer's keys and values, each [num_slots, num_kv_heads, head_dim].
        """
        keys, values = self.of_layer(layer)
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values

    def copy_blocks(self, block_copies: Sequence[BlockCopy]) -> None:
        """Copy the keys and values of whole blocks, in all layers.

        Args:
            block_copies: (source, destination) block ids; all sources are read before any destination is written.
        """
        if not block_copies:
            return
        sources, destinations = (list(blocks) for blocks in zip(*block_copies, strict=True))
        for tensor in (self._keys, self._values):
            blocks = tensor.view(len(tensor), self.num_blocks, self.block_size, *tensor.shape[2:])
            blocks[:, destinations] = blocks[:, sources]


def kv_dtype_name(name: str | None, model_dtype: torch.dtype, *, is_native: bool) -> str:
    """Return torch's name of the dtype in which keys and values are kept.

    Args:
        name: As of ``--kv-dtype``; None or ``"auto"``: the model's own.
        model_dtype: The model's.
        is_native: The model runs in native kernels, which read every one of them.

    Raises:
        InvalidInputError: there is no such dtype, or torch's operators, which know the model's alone, run it.

    Example:
        >>> import torch
        >>> kv_dtype_name("fp16", torch.bfloat16, is_native=True)
        'float16'
    """
    own = str(model_dtype).removeprefix("torch.")
    if name is None or name == "auto":
        return own
    if name not in _KV_DTYPES:
        raise InvalidInputError(f"--kv-dtype is auto, float32, bfloat16, float16 or int8, not {name!r}")
    found = _KV_DTYPES[name]
    if found != own and not is_native:
        raise InvalidInputError(
            f"--kv-dtype {name} needs a model in native kernels; torch's operators run this one, over keys and values "
            f"in its own {own}: leave --kv-dtype out"
        )
    return found


def kv_nbytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes that one token's keys and values take in all layers; memory budgets divide by it."""
    scale_nbytes = 0 if dtype.is_floating_point else SCALE_NBYTES
    return 2 * config.num_kv_layers * config.num_kv_heads * (config.head_dim * dtype.itemsize + scale_nbytes)


class RecurrentStates:
    """States of all requests.

    Args:
        part: Their sizes.
        num_states: Slots: the same as of the scheduler's block tables.
        device: The model's.
        empty: Makes a tensor of a shape and a dtype; None: as torch does.
    """

    def __init__(
        self,
        part: RecurrentPart,
        *,
        num_states: int,
        device: torch.device | str = "cpu",
        empty: Empty | None = None,
    ) -> None:
        import torch

        shape = (num_states, part.num_layers, part.num_floats)
        self.part = part
        self.floats = torch.empty(shape, device=device) if empty is None else empty(shape, torch.float32)

    def of(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return the views of recurrent layer number ``layer`` and one request.

        Returns:
            The convolution's inputs [num_taps - 1, num_channels], oldest first, and the state [num_heads, head_dim,
            state_size].
        """
        part, own = self.part, self.floats[slot, layer]
        kept = own[: part.num_kept_inputs].view(part.num_taps - 1, part.num_channels)
        return kept, own[part.num_kept_inputs :].view(part.num_heads, part.head_dim, part.state_size)
