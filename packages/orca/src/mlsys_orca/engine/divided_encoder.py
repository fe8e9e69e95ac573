"""A divided encoder as its callers see it: texts go to the ranks, the states of their tokens come back.

It keeps nothing between two batches, so a batch whose ranks have died runs again on others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_orca.engine.embedding import DEFAULT_BATCH_TOKENS, TextEncoder
from mlsys_orca.model.decoder import AttentionSpan
from mlsys_orca.model.encoder import PairHead
from mlsys_orca.model.encoder_family import EncoderConfig
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.encoder_parts import divide_encoder
from mlsys_orca.parallel.executor import ParallelExecutor
from mlsys_orca.parallel.group import Group, Holders
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.wiring import GroupShape
from torch import Tensor

_log = logging.getLogger(__name__)
_NUM_TRIES = 3  # of a batch
_SERVE_S = 60.0


class DividedEncoder:
    """Encoder whose parts run in other processes: :class:`~mlsys_orca.engine.embedding.States`. One caller at a time.

    Args:
        holders: Of its parts; they have started before the first call.
        config: The encoder's shape.
        num_threads: Of each rank.
    """

    head: PairHead | None = None
    device = torch.device("cpu")

    def __init__(self, holders: Holders, config: EncoderConfig, *, num_threads: int) -> None:
        self._holders, self._number = holders, 0
        self._executor: ParallelExecutor | None = None
        max_tokens = max(DEFAULT_BATCH_TOKENS, config.max_positions)
        self._shape = GroupShape(
            tensor_parallel=holders.model.tensor_parallel,
            pipeline_parallel=holders.model.pipeline_parallel,
            max_in_flight=1,
            max_tokens=max_tokens,
            max_rows=max_tokens,  # every token's states are its result
            hidden_size=config.hidden_size,
            vocab_size=config.hidden_size,
            num_blocks=1,
            num_threads=num_threads,
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
        """Return the states of all tokens, fp32 [num_tokens, hidden_size].

        Args:
            token_ids: [num_tokens] int64, text after text.
            positions: [num_tokens] int64, from 0 in each text.
            spans: One for each text.

        Raises:
            ServingError: the ranks died again and again, or do not come.
        """
        parts = tuple(messages.Part(span.stop - span.start, 0, ()) for span in spans)
        ids, wanted = tuple(token_ids.tolist()), tuple(range(len(token_ids)))
        for left in reversed(range(_NUM_TRIES)):
            try:
                return self._run(messages.Step(self._number, ids, parts, (), wanted, needs_logits=True))
            except (GroupBrokenError, OSError) as error:
                _log.warning("the ranks of the encoder are gone: %s", error)
                self.close()
                if not left:
                    raise ServingError(f"the encoder's ranks died {_NUM_TRIES} times over one batch") from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the ranks; the next call has others. Idempotent."""
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def _run(self, step: messages.Step) -> Tensor:
        if self._executor is None:
            group = Group(self._holders, self._shape)
            self._executor = group.executor()
            threading.Thread(target=_end_with_first, args=(group,), name="orca-encoder", daemon=True).start()
            self._executor.serve(0, timeout_s=_SERVE_S)
        self._number += 1
        return self._executor.results_of(step)


def _end_with_first(group: Group) -> None:
    """End all ranks of a group when one has ended or was stopped: others may wait for its sums."""
    group.cause(None)
    group.close()


def divides(path: Path, *, tensor_parallel: int, pipeline_parallel: int) -> bool:
    """Return whether those degrees divide the encoder at ``path``; other faults of it are for its loader to name."""
    try:
        divide_encoder(path, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    except InvalidInputError as error:
        _log.info("the encoder is not divided: %s", error)
        return False
    return True


def load_divided_encoder(
    path: Path | str,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    dtype: str | None = None,
    slices: bool | None = None,
    num_threads: int = 1,
) -> TextEncoder:
    """Return an encoder whose parts other processes will have: start its ``holders`` before it is used.

    Args:
        path: As of :func:`~mlsys_orca.engine.embedding.load_encoder`, and so ``dtype``.
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        dtype: See ``path``.
        slices: Sums have the shape that ranks can share; None: where there are several ranks.
        num_threads: Of each rank.

    Raises:
        InvalidInputError: there is no encoder at ``path``, it does not divide so, or it is a cross-encoder.
    """
    degrees = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    files, parts = divide_encoder(path, **degrees, dtype=dtype, slices=slices)
    holders = Holders(parts, name="embed")
    encoder = TextEncoder(
        files.name,
        config=files.config,
        encoder=DividedEncoder(holders, files.config, num_threads=num_threads),
        tokenizer=files.tokenizer(),
        pooling=files.pooling,
    )
    encoder.holders = holders
    return encoder
