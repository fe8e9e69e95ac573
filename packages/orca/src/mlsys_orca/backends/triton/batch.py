"""An iteration on the device: everything the forward reads, in one copy from pinned memory, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from mlsys_core.errors import MemoryPlanError
from mlsys_orca.backends.triton.plan import TileShape, plan_attention
from mlsys_orca.model.decoder import ForwardInputs
from torch import Tensor

_ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are aligned otherwise


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """An iteration's requests as the attention kernel reads them. Owner: the decoder, for this iteration."""

    tile: TileShape
    block_size: int  # tokens per K/V block
    block_tables: Tensor  # [num_requests, most blocks of any] int32, padded with any id
    items: Tensor  # AttentionPlan.items, int32
    merges: Tensor  # AttentionPlan.merges, int32
    num_partial_rows: int  # AttentionPlan.num_partial_rows


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One iteration as tensors on the device. Owner: the decoder, for this iteration."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, position of each token in its request
    slots: Tensor  # [num_tokens] int64, the K/V slot each token's key and value go to
    sampled_rows: Tensor  # [num_sampled] int64, the rows whose logits are wanted
    ragged: RaggedBatch


def to_device(inputs: ForwardInputs, tile: TileShape) -> DeviceBatch:
    """Plan an iteration's attention, and bring all that the forward reads to the device.

    Args:
        inputs: The iteration.
        tile: Tiles of the model's attention.

    Raises:
        MemoryPlanError: a request's block table is too short for its tokens.

    Example:
        >>> from mlsys_orca.scheduling.batch import BatchBuilder
        >>> builder = BatchBuilder()
        >>> builder.add("a", (5, 6, 7), num_computed_tokens=3, block_table=(4, 2), sampling=None)
        >>> inputs = ForwardInputs(builder.build(), block_size=4, device="cpu")
        >>> to_device(inputs, TileShape(num_rows=16, num_keys=16, split_keys=32, group=1)).slots.tolist()
        [19, 8, 9]
    """
    batch, block_size, requests = inputs.batch, inputs.block_size, inputs.batch.requests
    for request in requests:
        if len(request.block_table) * block_size < request.context_len:
            raise MemoryPlanError(
                f"{len(request.block_table)} K/V blocks of {block_size} do not hold {request.context_len} tokens"
            )
    num_tokens = [request.num_tokens for request in requests]
    tables = np.zeros((len(requests), max(len(request.block_table) for request in requests)), dtype=np.int32)
    for row, request in zip(tables, requests, strict=True):
        row[: len(request.block_table)] = request.block_table
    positions = np.array(batch.positions, dtype=np.int64)
    blocks = tables[np.repeat(np.arange(len(requests)), num_tokens), positions // block_size].astype(np.int64)
    plan = plan_attention(num_tokens, [request.context_len for request in requests], tile)
    arrays = (
        np.array(batch.token_ids, dtype=np.int64),
        positions,
        blocks * block_size + positions % block_size,
        np.array(inputs.wanted, dtype=np.int64),
        tables,
        plan.items,
        plan.merges,
    )
    token_ids, positions_there, slots, sampled_rows, block_tables, items, merges = _copy(arrays, inputs.device)
    ragged = RaggedBatch(tile, block_size, block_tables, items, merges, plan.num_partial_rows)
    return DeviceBatch(token_ids, positions_there, slots, sampled_rows, ragged)


def _copy(arrays: tuple[np.ndarray, ...], device: torch.device) -> list[Tensor]:
    """Copy ``arrays`` to ``device`` as tensors, views of one buffer that crosses in one piece."""
    starts, nbytes = [], 0
    for array in arrays:
        starts.append(nbytes)
        nbytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    bytes_here = here.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_here[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    there = here.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
