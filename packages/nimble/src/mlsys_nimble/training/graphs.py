"""One graph of AOTAutograd, forward or backward: captured when first called, then replayed.

A graph may have symbolic sizes, which dynamo uses where batches differ; it is captured for each set of sizes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from mlsys_nimble.backends.executor import Executor
from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.refusals import faults_refused
from mlsys_nimble.errors import CaptureError
from mlsys_nimble.ir.program import Program
from mlsys_nimble.passes import optimise
from mlsys_nimble.state.forks import CAPTURE_LOCK, renew_in_forks
from mlsys_nimble.training.passes import TRAINING_PASSES
from mlsys_nimble.training.rows import share_saved_copies

_LOG = logging.getLogger("mlsys_nimble")

MakeExecutor = Callable[..., Executor]


class Partition:
    """Function that partitions AOTAutograd's joint graph, and remembers the number of the forward graph's results.

    Args:
        rematerialises: True recomputes cheap values in the backward graph (min-cut); False saves everything.
    """

    def __init__(self, *, rematerialises: bool) -> None:
        self._cut: Any = min_cut_rematerialization_partition if rematerialises else default_partition
        self.num_results: int | None = None

    def __call__(self, joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Return the forward and the backward graph."""
        self.num_results = num_fwd_outputs
        return self._cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


MAX_SIZES = 8  # sets of sizes kept for one graph of symbolic sizes


@dataclass(frozen=True, slots=True)
class Replay:
    """Graph prepared for one set of argument sizes."""

    captured: Captured
    program: Program
    executor: Executor


class ReplayedGraph:
    """Graph in AOTAutograd's calling convention: it takes a list of arguments, which it empties.

    Args:
        graph: Graph of ATen operators without side effects.
        make_executor: Function of a program and the device that it was captured on.
        num_results: Number of first outputs that the caller gets; the others are saved for the backward pass. None:
            all.
        falls_back: True runs a graph that cannot be replayed eagerly, with a warning.
    """

    def __init__(
        self,
        graph: torch.fx.GraphModule,
        make_executor: MakeExecutor,
        *,
        num_results: int | None = None,
        falls_back: bool = False,
    ) -> None:
        for node in graph.graph.nodes:  # values may have other strides than AOTAutograd assumed when it chose views
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()
        self._graph = graph
        self._falls_back = falls_back
        self._is_eager = False
        self._make_executor = make_executor
        self._num_results = num_results
        self.renew()
        renew_in_forks(self)
        self._known: OrderedDict[Any, Replay] = OrderedDict()
        self._latest: Replay | None = None

    def renew(self) -> None:
        """Make a new lock: no call is running."""
        self._turn = threading.Lock()

    def __call__(self, arguments: list[Any]) -> Any:
        """Return the graph's results."""
        with self._turn:
            key = tuple([a.shape if isinstance(a, torch.Tensor) else a for a in arguments])
            replay = None if self._is_eager else self._known.get(key)
            if replay is None:
                try:
                    replay = None if self._is_eager else self._prepare(arguments)
                except CaptureError as error:
                    if not self._falls_back:
                        raise
                    _LOG.warning("a graph runs eagerly: %s", error)
                    self._is_eager = True
                if replay is None:
                    given = list(arguments)
                    arguments.clear()
                    with torch.no_grad():
                        return self._graph(*given)
                self._known[key] = replay
                if len(self._known) > MAX_SIZES:
                    self._known.popitem(last=False)
            self._latest = replay
            inputs = [arguments[index] for index in replay.captured.tensor_indices]
            arguments.clear()
            with torch._C.DisableTorchFunction():  # the default device is not the program's
                outputs = replay.executor.run(inputs)
        return replay.captured.results.build(outputs, inputs, replay.program, [])

    @property
    def program(self) -> Program | None:
        """Return the program replayed last."""
        return self._latest.program if self._latest else None

    @property
    def executor(self) -> Executor | None:
        """Return the executor of the program replayed last."""
        return self._latest.executor if self._latest else None

    def as_function(self) -> Callable[[list[Any]], Any]:
        """Return the graph as a function marked as taking a list; dynamo's wrappers keep a function's mark."""

        def call(arguments: list[Any]) -> Any:
            return self(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _prepare(self, arguments: Sequence[Any]) -> Replay:
        with faults_refused():
            return self._make_replay(arguments)

    def _make_replay(self, arguments: Sequence[Any]) -> Replay:
        with CAPTURE_LOCK:
            captured = capture(self._graph, arguments)
        program = captured.program
        if self._num_results is not None:
            results = [index for index in captured.results.tensor_indices if index < self._num_results]
            program = share_saved_copies(program, len(results))
        program, _ = optimise(program, TRAINING_PASSES)
        return Replay(captured, program, self._make_executor(program, captured.device))
