"""One graph that AOTAutograd has cut out, forward or backward: captured when first called, then replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._pytree import tree_unflatten

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.executor import Executor
from mlsys_nimble.passes import optimise
from mlsys_nimble.program import Program
from mlsys_nimble.training.passes import TRAINING_PASSES
from mlsys_nimble.training.rows import share_saved_copies

MakeExecutor = Callable[..., Executor]


class Partition:
    """How AOTAutograd cuts a graph in two, which also tells how many of the forward graph's outputs are results.

    Args:
        rematerialises: Whether the backward graph computes again what is cheap (min-cut); else everything is saved.
    """

    def __init__(self, *, rematerialises: bool) -> None:
        self._cut: Any = min_cut_rematerialization_partition if rematerialises else default_partition
        self.num_results: int | None = None

    def __call__(self, joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """The forward and the backward graph."""
        self.num_results = num_fwd_outputs
        return self._cut(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)


_CAPTURE_LOCK = threading.Lock()  # a trace sets flags of the whole process


class ReplayedGraph:
    """A graph as AOTAutograd calls it: with a list of arguments, which it empties.

    Args:
        graph: Of ATen operators, without side effects.
        make_executor: Of a program and the device that it was captured on.
        num_results: Of the outputs, how many the caller sees: the first ones, as the others are saved for the backward
            pass; None: all.
    """

    def __init__(
        self, graph: torch.fx.GraphModule, make_executor: MakeExecutor, *, num_results: int | None = None
    ) -> None:
        self._graph: torch.fx.GraphModule | None = graph
        self._make_executor = make_executor
        self._num_results = num_results
        self._turn = threading.Lock()
        self._captured: Captured | None = None
        self.program: Program | None = None
        self.executor: Executor | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        """The graph's results."""
        with self._turn:
            if self.executor is None:
                self._prepare(arguments)
            assert self._captured is not None
            assert self.executor is not None
            inputs = [arguments[place] for place in self._captured.tensor_places]
            arguments.clear()
            outputs = self.executor.run(inputs)
        leaves = list(self._captured.out_leaves)
        for place, tensor in zip(self._captured.output_places, outputs, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._captured.out_spec)

    def as_function(self) -> Callable[[list[Any]], Any]:
        """The graph as a function that says that it takes a list; dynamo's wrappers keep what a function says."""

        def call(arguments: list[Any]) -> Any:
            return self(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _prepare(self, arguments: Sequence[Any]) -> None:
        assert self._graph is not None
        with _CAPTURE_LOCK:
            self._captured = capture(self._graph, _as_traced(self._graph, arguments))
        program = self._captured.program
        if self._num_results is not None:
            results = [place for place in self._captured.output_places if place < self._num_results]
            program = share_saved_copies(program, len(results))
        self.program, _ = optimise(program, TRAINING_PASSES)
        self.executor = self._make_executor(self.program, self._captured.device)
        self._graph = None


def _as_traced(graph: torch.fx.GraphModule, arguments: Sequence[Any]) -> list[Any]:
    """The arguments, lying as AOTAutograd believed when it chose views or copies; replays ask only for shapes.

    What a forward graph saves may lie otherwise: channels last, say.
    """
    found = list(arguments)
    places = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    for index, (value, believed) in enumerate(zip(arguments, places, strict=True)):
        if not isinstance(value, torch.Tensor) or not isinstance(believed, torch.Tensor):
            continue
        if value.stride() != believed.stride():
            made = torch.empty_strided(value.shape, believed.stride(), dtype=value.dtype, device=value.device)
            found[index] = made.copy_(value)
    return found
