"""Interface between the runner and a decoder-only model, and the tensors that cross it.

Between :mod:`mlsys_orca.backends.runner`, which builds :class:`ForwardInputs` from an iteration's batch, and the
model families, which implement :class:`DecoderModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.kv_cache import slots_of
from mlsys_orca.scheduling.batch import IterationBatch, RequestSlice
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One request's attention in one iteration: its query rows, and where the keys and values they see are."""

    start: int  # row of the flattened batch
    stop: int  # row, exclusive
    context_len: int  # keys seen by the last row; row stop - 1 - n sees n fewer
    slots: slice | Tensor  # [context_len] K/V slots in order of position: a slice where they are adjacent, else int64


class LogitsRoom:
    """Memory for one iteration's logits after another: they are megabytes, which the system would clear each time.

    Owner: the runner, which has read an iteration's logits before the next one begins.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, num_rows: int, vocab_size: int) -> Tensor:
        """Return uninitialised fp32 [num_rows, vocab_size]; what was taken before is overwritten."""
        size = num_rows * vocab_size
        if self._memory.numel() < size:
            self._memory = torch.empty(size)
        return self._memory[:size].view(num_rows, vocab_size)


class ForwardInputs:
    """One iteration as tensors on the model's device, each made when it is first asked for. Owner: the runner.

    Args:
        batch: The iteration that the scheduler planned.
        block_size: Slots of a K/V block.
        device: The model's.
        wanted: Rows whose logits are wanted; None: the last of each request that samples.
        room: Where a model may put the logits; None: in memory of their own.
        needs_logits: False: each row's largest is enough. A model that finds these on the way may give logits without
            columns.
    """

    def __init__(
        self,
        batch: IterationBatch,
        *,
        block_size: int,
        device: torch.device | str,
        wanted: Sequence[int] | None = None,
        room: LogitsRoom | None = None,
        needs_logits: bool = True,
    ) -> None:
        self.batch = batch
        self.block_size = block_size
        self.device = torch.device(device)
        self.wanted = [request.stop - 1 for request in batch.sampled] if wanted is None else wanted
        self.room = room or LogitsRoom()
        self.needs_logits = needs_logits

    @cached_property
    def token_ids(self) -> Tensor:
        """[num_tokens] int64."""
        return self._tensor(self.batch.token_ids)

    @cached_property
    def positions(self) -> Tensor:
        """[num_tokens] int64, position of each token in its request."""
        return self._tensor(self.batch.positions)

    @cached_property
    def slots(self) -> Tensor:
        """[num_tokens] int64, the K/V slot each token's key and value go to."""
        return self._tensor([slot for request in self.batch.requests for slot in self._slots_of(request, new=True)])

    @cached_property
    def spans(self) -> tuple[AttentionSpan, ...]:
        """[num_requests] in row order."""
        return tuple(
            AttentionSpan(request.start, request.stop, request.context_len, self._where(self._slots_of(request)))
            for request in self.batch.requests
        )

    @cached_property
    def sampled_rows(self) -> Tensor:
        """[num_sampled] int64, the rows whose logits are wanted."""
        return self._tensor(self.wanted)

    def _slots_of(self, request: RequestSlice, *, new: bool = False) -> range | list[int]:
        first = request.num_computed_tokens if new else 0
        return slots_of(request.block_table, first, request.context_len, block_size=self.block_size)

    def _where(self, slots: range | list[int]) -> slice | Tensor:
        return slice(slots.start, slots.stop) if isinstance(slots, range) else self._tensor(slots)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        found = torch.from_numpy(np.array(values, dtype=np.int64))  # a third of torch.tensor's time
        return found if self.device.type == "cpu" else found.to(self.device)


class DecoderModel(Protocol):
    """A loaded decoder: its flattened forward. A family (:mod:`mlsys_orca.model.family`) loads it."""

    config: ModelConfig
    dtype: torch.dtype  # of weights, keys and values
    device: torch.device

    def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size].

        ``kv_cache`` is of the kind that :func:`mlsys_orca.backends.native.decoder.new_kv_cache` makes for this model.
        """
        ...
