"""The cache that native attention reads: keys and values of all layers, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.library import PANEL, RUN
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.kv_cache import SCALE_NBYTES, Empty, RecurrentStates
from mlsys_orca.scheduling.batch import BlockCopy
from torch import Tensor

_KINDS = {torch.float32: "floats", torch.float16: "fp16", torch.int8: "codes"}


class NativeKVCache:
    """Keys and values of all layers, block by block, in the order that native attention reads.

    Blocks stand in runs of 64, layer after layer in each: memory is taken as requests come, by all layers of a run and
    not of all blocks. A block's keys of one head stand feature after feature, its values token after token; where pairs
    of bf16 are multiplied, two features, and two tokens, stand side by side. In int8 a token's key, and its value, of
    each head has a scale in fp32, so that its largest magnitude is 127; the scales of a block stand behind it.

    Args:
        config: The model's shape.
        num_blocks: The scheduler's number of blocks.
        num_states: Slots for the states of a recurrent model's requests.
        dtype: fp32, bf16, fp16 or int8; it need not be the model's.
        empty: Makes a tensor of a shape and a dtype; None: as torch does.
    """

    block_size = PANEL

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_states: int = 1,
        dtype: torch.dtype,
        empty: Empty | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.dtype = dtype
        if dtype == torch.bfloat16:  # how the program reads it: kv_layout.h, CacheKind
            self.kind = "pairs" if library.load().orca_attends_in_pairs(config.head_dim) else "halves"
        else:
            self.kind = _KINDS[dtype]
        heads = (-(-num_blocks // RUN), config.num_kv_layers, RUN, config.num_kv_heads)
        empty = empty or _empty
        width = -(-config.head_dim // PANEL) * PANEL
        if dtype.is_floating_point:
            self.keys = empty((*heads, config.head_dim, PANEL), dtype)
            self.values = empty((*heads, PANEL, width), dtype)
        else:
            scales = PANEL * SCALE_NBYTES
            self.keys = empty((*heads, config.head_dim * PANEL + scales), dtype)
            self.values = empty((*heads, PANEL * width + scales), dtype)
        self.states = None
        if config.recurrent is not None:
            self.states = RecurrentStates(config.recurrent, num_states=num_states, empty=empty)
        for tensor in (self.keys, self.values):
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks' keys and values; what the last run has beside them is never touched."""
        return (self.keys.nbytes + self.values.nbytes) * self.num_blocks // (len(self.keys) * RUN)

    def copy_blocks(self, block_copies: Sequence[BlockCopy]) -> None:
        """Copy blocks; see :meth:`mlsys_orca.model.kv_cache.KVCache.copy_blocks`."""
        if not block_copies:
            return
        sources, destinations = (torch.tensor(blocks) for blocks in zip(*block_copies, strict=True))
        for tensor in (self.keys, self.values):
            tensor[destinations // RUN, :, destinations % RUN] = tensor[sources // RUN, :, sources % RUN]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
