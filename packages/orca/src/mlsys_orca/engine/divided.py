"""Sizes of the groups that run a divided model for an engine."""

from __future__ import annotations

from mlsys_orca.engine.settings import EngineConfig, EngineShape
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.parallel.ranks import ParallelModel
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_orca.scheduling.request_pool import MAX_SCORED_ROWS


def group_shape(
    model: ParallelModel, whole: ModelConfig, shape: EngineShape, config: EngineConfig, *, num_ahead: int = 0
) -> GroupShape:
    """Return the sizes of an engine's groups.

    Args:
        model: The parts.
        whole: The model's configuration.
        shape: The engine's limits.
        config: Its settings.
        num_ahead: Iterations in flight beyond one for each stage.
    """
    # Every row of an iteration has a K/V slot of its own, so there cannot be more rows than slots.
    max_tokens = min(config.max_batch_size * shape.max_model_len, shape.num_kv_tokens)
    rows_of_one = max(MAX_SCORED_ROWS + 1, config.num_draft_tokens + 1)
    return GroupShape(
        tensor_parallel=model.tensor_parallel,
        pipeline_parallel=model.pipeline_parallel,
        max_in_flight=model.pipeline_parallel + num_ahead,
        max_tokens=max_tokens,
        max_rows=min(max_tokens, config.max_batch_size * rows_of_one),
        hidden_size=whole.hidden_size,
        vocab_size=whole.vocab_size,
        num_blocks=shape.num_blocks,
        kv_dtype=shape.kv_dtype,
        num_threads=config.num_threads,
    )
