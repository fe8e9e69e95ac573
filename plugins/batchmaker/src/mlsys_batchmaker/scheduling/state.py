"""State that admission, batching and completion share: the tables, the ready nodes, the counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import Kind
from mlsys_batchmaker.scheduling.compiled import Compiled, load
from mlsys_batchmaker.scheduling.results import Results
from mlsys_batchmaker.scheduling.tables import ReadyNodes, Tables

_MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings for batching.

    Raises:
        InvalidInputError: a number is below 1, or a word is none of those allowed.
    """

    max_tasks_to_submit: int = 5  # MaxTasksToSubmit of Algorithm 1
    batching: Literal["cell", "chunk"] = "cell"  # "cell": a step a task, as in the paper; "chunk": the steps of a round
    # as one task where cells form chains, so that they can run as one multi-step call
    round_s: float = 0.0  # chunks take more steps than ``max_tasks_to_submit`` where that lasts no longer than this
    lookahead: Literal["speculative", "one"] = "speculative"  # chains that may stop: "speculative" submits steps beyond
    # what is known and drops what comes after a stop; "one" waits for each step's outcome
    max_waiting: int | None = None  # requests that wait for room; beyond it a request is refused; None: no bound

    def __post_init__(self) -> None:
        if self.max_tasks_to_submit < 1 or (self.max_waiting is not None and self.max_waiting < 0):
            raise InvalidInputError("max_tasks_to_submit must be at least 1, and max_waiting at least 0")
        if not 0 <= self.round_s < 60:
            raise InvalidInputError(f"round_s={self.round_s}: seconds, at least 0 and far below a minute")
        if self.batching not in ("cell", "chunk"):
            raise InvalidInputError(f"batching={self.batching!r}: 'cell' or 'chunk'")
        if self.lookahead not in ("speculative", "one"):
            raise InvalidInputError(f"lookahead={self.lookahead!r}: 'speculative' or 'one'")


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    tasks: int = 0
    cells: int = 0  # in completed tasks, without padding
    padded_cells: int = 0  # computed, with the padding to supported batch sizes
    discarded_cells: int = 0  # computed after their chain had stopped
    gathers: int = 0  # tasks whose set of requests was another than that of the worker's task before
    copied_rows: int = 0  # rows fetched from another device

    @property
    def effective_batch_size(self) -> float:
        """Rows per task, without padding; chunks count their steps."""
        return self.cells / self.tasks if self.tasks else 0.0

    @property
    def padding_waste(self) -> float:
        """The part of the cells computed that is padding, in [0, 1)."""
        return 1.0 - self.cells / self.padded_cells if self.padded_cells else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return all counters by name."""
        totals: dict[str, float] = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**totals, "effective_batch_size": self.effective_batch_size, "padding_waste": self.padding_waste}


@dataclass(slots=True)
class State:
    """The manager's memory; only the loop's thread touches it."""

    layout: Layout
    config: SchedulerConfig
    devices: tuple[int, ...]  # by worker: the device it runs on; workers of one device share its state pool
    tables: Tables
    cells: Any  # by cell: scheduler.cpp's Cell
    ready: list[ReadyNodes]  # by cell
    calls: Compiled
    running: list[int]  # by cell: NumRunningTasks, over all workers
    carry: list[tuple[int, ...] | None]  # by cell: what its chains carry; None: not known yet
    is_awaited: list[bool]  # by cell: other subgraphs wait for one of its subgraphs
    homes: list[NDArray[np.int8]] | None  # by bank: the device of each row, -1: all devices; None: there is one device
    step_s: list[float]  # by cell: how long a step of the latest chunk took, with what surrounds it; inf: not known
    results: Results
    num_streaming: int = 0  # requests here that hear of values as they come
    counters: Counters = field(default_factory=Counters)
    known: set[tuple[Kind, ...]] = field(default_factory=set)  # kinds of the plans admitted so far
    latest: tuple[Kind, ...] = ()  # kinds of the latest one

    @classmethod
    def new(cls, layout: Layout, config: SchedulerConfig, devices: Sequence[int], num_rows: Sequence[int]) -> State:
        """Make an empty state.

        Raises:
            KernelUnavailableError: the wheel has no library for this processor, and there is no C++ compiler.
        """
        count = len(layout.cells)
        library = load()
        columns, cells = library.structs["Columns"](), (library.structs["Cell"] * count)()
        tables = Tables(layout.num_inputs, layout.num_outputs, columns)
        for number, (cell, spec) in enumerate(zip(cells, layout.cells, strict=True)):
            cell.number, cell.num_inputs, cell.num_outputs = number, len(spec.inputs), len(spec.outputs)
            cell.max_batch, cell.is_chain, cell.has_joins, cell.last_rank = spec.max_batch_size, True, False, -1
        ready = [ReadyNodes(cell.ready) for cell in cells]
        most = max(spec.max_batch_size for spec in layout.cells)
        options = {"num_banks": layout.none, "num_workers": len(devices), "max_batch": most}
        return cls(
            layout=layout,
            config=config,
            devices=tuple(devices),
            tables=tables,
            cells=cells,
            ready=ready,
            calls=Compiled(library, columns, cells, ready, **options),
            running=[0] * count,
            carry=[None] * count,
            is_awaited=[False] * count,
            homes=[np.full(rows, -1, dtype=np.int8) for rows in num_rows] if len(set(devices)) > 1 else None,
            step_s=[float("inf")] * count,
            results=Results(layout),
        )

    def max_steps(self, cell: int) -> int:
        """Return the steps of a round: MaxTasksToSubmit, or for cheap cells as many as fill ``round_s``."""
        least = self.config.max_tasks_to_submit
        if self.config.batching == "cell" or self.step_s[cell] == 0.0:
            return least
        return max(least, min(_MAX_STEPS, int(self.config.round_s / self.step_s[cell])))

    def is_blind(self, cell: int) -> bool:
        """Return whether a node's successor becomes ready only when the node's outcome is known.

        Speculative steps write over the rows of their chain, so a chain that others read from never speculates.
        """
        may_stop = self.layout.cells[cell].stop is not None
        return may_stop and (self.config.lookahead == "one" or self.is_awaited[cell])

    def note_subgraphs(self, kinds: tuple[Kind, ...]) -> None:
        """Learn what the subgraphs of the cell types are like: only chains that all carry the same run as chunks."""
        if kinds is self.latest or kinds in self.known:
            return
        self.known.add(kinds)
        self.latest = kinds
        for kind in kinds:
            cell = self.cells[kind.cell]
            cell.has_joins |= kind.joins
            self.is_awaited[kind.cell] = self.is_awaited[kind.cell] or kind.is_awaited
            if kind.carry is None or (kind.carry and self.carry[kind.cell] not in (None, kind.carry)):
                cell.is_chain = False
            elif kind.carry:
                self.carry[kind.cell] = kind.carry
