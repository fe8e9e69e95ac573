"""What the runner asks of a decoder-only model, and the tensors it hands over.

Between :mod:`mlsys_orca.runner`, which builds :class:`ForwardInputs` from an iteration's batch, and the model families,
which implement :class:`DecoderModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlsys_orca.kv_cache import KVCache
from mlsys_orca.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One request's attention in one iteration: its query rows, and where the keys and values they see are."""

    start: int  # row of the flattened batch
    stop: int  # row, exclusive
    context_len: int  # keys seen by the last row; row stop - 1 - n sees n fewer
    slots: slice | Tensor  # [context_len] K/V slots in order of position: a slice where they are adjacent, else int64


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One iteration as tensors on the model's device. Owner: the runner, for this iteration."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64, position of each token in its request
    slots: Tensor  # [num_tokens] int64, the K/V slot each token's key and value go to
    spans: tuple[AttentionSpan, ...]  # [num_requests] in row order
    sampled_rows: Tensor  # [num_sampled] int64, the rows whose logits are wanted


class DecoderModel(Protocol):
    """A loaded decoder: its flattened forward. A family (:mod:`mlsys_orca.models.family`) loads it."""

    config: ModelConfig
    dtype: torch.dtype  # of weights, keys and values
    device: torch.device

    def __call__(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""
        ...
