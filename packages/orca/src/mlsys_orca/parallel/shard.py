"""One process's part of a model, as the processes around it see it: the seam between parts and groups.

:func:`mlsys_orca.parallel.loading.load_shard` makes one. A holder process keeps it, forks a rank, and the rank joins
its group: the same weights, threads of its own, and sums with the other ranks of its stage through a reducer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from mlsys_core.errors import ServingError

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.kv_cache import Empty
from mlsys_orca.parallel.placement import Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from mlsys_orca.backends.native.iteration import NativeKVCache
    from mlsys_orca.model.decoder import ForwardInputs


class GroupBrokenError(ServingError):
    """Another rank is gone, or the group was told to end: this rank's results are void."""


class Reducer(Protocol):
    """Memory in which the ranks of one stage meet. Each rank has its own object over the same memory."""

    rank: int
    num_ranks: int

    @property
    def address(self) -> int:
        """Address of the native meeting (backends/native/meeting.h), for programs that meet there."""
        ...

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Return every rank's fp32 tensor of ``own``'s shape, by rank; all ranks call it alike.

        What is returned is overwritten by the exchange after the next. It takes as many parts as its memory demands.

        Raises:
            GroupBrokenError: :meth:`abort` was called, by whichever process.
        """
        ...

    def abort(self) -> None:
        """Wake all that wait, here and in the other ranks; their runs end with an error. Any thread may call it."""
        ...


class Shard(Protocol):
    """One process's part of a model. Owner: the process that loaded it, or a child forked from it."""

    config: ModelConfig  # of this part: its layers, heads, features and rows of the vocabulary
    whole: ModelConfig  # of the model
    placement: Placement
    needs_logits: bool  # the model's largest logit is known from all logits alone: a soft cap may make equals of two

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        ...

    def new_kv_cache(self, *, num_blocks: int, dtype: str | None = None, empty: Empty | None = None) -> NativeKVCache:
        """Make an empty cache for the keys and values of this part.

        Args:
            num_blocks: The scheduler's number of blocks.
            dtype: Of keys and values, as ``--kv-dtype`` has it; None: this part's own.
            empty: Makes its tensors, if given.

        Raises:
            InvalidInputError: this part cannot read that dtype.
        """
        ...

    def join(self, reducer: Reducer | None, *, num_threads: int) -> Self:
        """Return this part with the same weights, ``num_threads`` threads of its own, and sums through ``reducer``.

        To be called in the process that runs it, after a fork.

        Raises:
            InvalidInputError: the part is one of several ranks' and there is no reducer, or the reducer is another's.
        """
        ...

    def run(self, inputs: ForwardInputs, states: Tensor | None, out: Tensor | None, kv_cache: NativeKVCache) -> None:
        """Run this part's layers over one iteration, and write what the next stage or the master reads.

        All ranks of a stage call it with the same batches in the same order.

        Args:
            inputs: The iteration. ``inputs.needs_logits`` False: the last stage gives peaks.
            states: fp32 [num_tokens, hidden_size] of the stage before, not changed; None: this is the first stage.
            out: None: the caller does not need this rank's result. Else, of any stage but the last: fp32 [num_tokens,
                hidden_size], for the states, which all ranks of the stage have. Of the last: fp32 [num_sampled,
                whole.vocab_size], of which this rank writes its own columns (``placement.vocabulary(whole)``); or, if
                ``inputs.needs_logits`` is False and :attr:`needs_logits` too, this rank's peaks: float64
                [num_sampled, 2], its largest logit and that one's column in the whole vocabulary.
            kv_cache: This part's own.

        Raises:
            GroupBrokenError: another rank is gone; ``out`` and the iteration's keys and values are void.
            MemoryPlanError: a request's block table is too short for its tokens.
        """
        ...


def largest_of(peaks: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column of each row's largest logit, the first of equals, from the peaks of all ranks.

    Args:
        peaks: [num_ranks, num_sampled, 2], as :meth:`Shard.run` writes them, in the order of the ranks.

    Example:
        >>> largest_of(np.array([[[1.0, 3], [5.0, 0]], [[2.0, 7], [5.0, 9]]])).tolist()
        [7, 0]
    """
    if len(peaks) == 1:
        return peaks[0, :, 1].astype(np.int64)
    ranks = peaks[:, :, 0].argmax(axis=0)  # the first of equals
    found: NDArray[np.int64] = peaks[ranks, np.arange(peaks.shape[1]), 1].astype(np.int64)
    return found
