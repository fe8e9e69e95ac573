"""Settings of an engine. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlsys_core.errors import InvalidInputError

from mlsys_batchmaker.scheduling.state import SchedulerConfig
from mlsys_batchmaker.workers.materialise import AUTO
from mlsys_batchmaker.workers.pool import DEFAULT_POOL_BYTES


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings for running a model.

    Raises:
        InvalidInputError: a number is below 1.
    """

    num_workers: int = 1  # each a thread of its own with one thread of torch
    executor: Literal["cell", "chunk"] = "chunk"  # a step a task (the paper), or a round's steps in one call
    max_tasks_to_submit: int = 5
    round_s: float = 0.001  # chunks of cheap cells take more steps, as long as a round lasts no longer
    lookahead: Literal["speculative", "one"] = "speculative"
    max_waiting: int | None = None
    max_cells: int | None = None  # most cells of a request; None: the model's own limit
    pool_bytes: int = DEFAULT_POOL_BYTES
    memory_pool: str | None = None  # the registered name of the pool of state rows; None: the core's own
    compiler: str = AUTO  # a name of the registry, "eager", or "auto": on the CPU this package's own loops for the
    # cells that have a form for them, for others Nimble where a plugin offers it, and eager for what Nimble refuses
    device: str = "cpu"  # the registered name of where the cells run

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise InvalidInputError(f"num_workers={self.num_workers}: at least 1 is needed")
        if self.max_cells is not None and self.max_cells < 1:
            raise InvalidInputError(f"max_cells={self.max_cells}: at least 1 is needed")
        self.scheduling()  # checks the others

    def scheduling(self) -> SchedulerConfig:
        """Return the settings of the scheduler."""
        return SchedulerConfig(
            max_tasks_to_submit=self.max_tasks_to_submit,
            batching=self.executor,
            round_s=self.round_s,
            lookahead=self.lookahead,
            max_waiting=self.max_waiting,
        )
