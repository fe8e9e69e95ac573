"""Models with exit heads: outputs of one shape, each a better answer than the one before (section 9.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_dvabatch.stages.activations import Padded, to_host
from mlsys_dvabatch.stages.slicing.program import Program
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_serving.certainty import RULES, certainty
from torch import fx


class ExitingModel(SlicedModel):
    """A classifier whose requests leave at the first head that is sure; see :class:`SlicedModel` for the rest.

    It is cut behind each head. A request's result is the scores of the head that it left at, and that head's number.

    Args:
        program: its outputs are the heads, ``[requests, classes]`` each, in order.
        confidence: how certain a head must be, above 0 and at most 1.
        rule: Measure of certainty; see :func:`mlsys_serving.certainty.certainty`.

    Raises:
        InvalidInputError: the outputs are no such heads, or the confidence is out of range.
    """

    def __init__(self, program: Program, confidence: float, *, rule: str = "confidence") -> None:
        self.decide_by(confidence, rule)
        program = replace(_in_order_of_heads(program), output_names=())
        heads, cuts = _heads(program)
        self._heads = heads
        super().__init__(program, cuts)

    def decide_by(self, confidence: float, rule: str = "confidence") -> None:
        """Let requests leave by another rule from now on. Raises as the constructor."""
        if not 0 < confidence <= 1:
            raise InvalidInputError(f"an exit confidence of {confidence}: give a number above 0 and at most 1")
        if rule not in RULES:
            raise InvalidInputError(f"--exit-rule {rule!r}: give {', '.join(RULES)}")
        self._confidence, self._rule = confidence, rule

    def inspect(self, stage: int, values: Padded) -> tuple[Mapping[int, Any], Mapping[int, int]]:
        """Return the results of those requests of which the head behind ``stage`` is sure; nobody skips stages."""
        scores = values.tensors[self._heads[stage]]
        sure = np.flatnonzero(certainty(to_host(scores), self._rule) >= self._confidence).tolist()
        results = self._results(scores, stage)
        return {position: results[position] for position in sure}, {}

    def results(self, values: Padded) -> list[Any]:
        """Return the last head's scores, and its number, of each request."""
        return self._results(list(values.tensors.values())[-1], len(self._heads) - 1)

    @staticmethod
    def _results(scores: torch.Tensor, head: int) -> list[Any]:
        rows = SlicedModel.results_of(Padded({"scores": scores}))
        return [(row, np.array(head, np.int64)) for row in rows]


def _in_order_of_heads(program: Program) -> Program:
    """Return the program with what each head needs before what only later heads need.

    A forward that computes all its heads at the end would otherwise have nothing left to save behind the first.
    """
    graph = program.module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    given = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    place = {node: number for number, node in enumerate(program.operators)}
    needed = [_needed(head, place) for head in given]
    shared = [sum(any(node in other for other in needed if other is not own) for node in own) for own in needed]
    if shared != sorted(shared):  # a later head needs less of what heads have in common
        return program
    ordered: dict[fx.Node, None] = {}
    for own in needed:
        ordered |= dict.fromkeys(sorted(own - ordered.keys(), key=place.__getitem__))
    ordered |= dict.fromkeys(program.operators)  # what no head needs
    for node in ordered:
        output.prepend(node)
    graph.lint()
    program.module.recompile()
    return replace(program, operators=tuple(ordered))


def _needed(head: Any, operators: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the operators that a head needs, its own among them."""
    found: set[fx.Node] = set()
    waiting = [head] if isinstance(head, fx.Node) else []
    while waiting:
        node = waiting.pop()
        if node in operators and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _heads(program: Program) -> tuple[list[str], list[int]]:
    """Return the names of the heads, and where to cut: as soon as possible behind each but the last."""
    output = next(node for node in program.module.graph.nodes if node.op == "output")
    given = output.args[0] if isinstance(output.args[0], (tuple, list)) else [output.args[0]]
    position = {node.name: number for number, node in enumerate(program.operators)}
    names = [str(getattr(node, "name", node)) for node in given]
    shapes = [program.shapes.get(name, ()) for name in names]
    if len(names) < 2 or len(set(shapes)) != 1 or len(shapes[0]) != 2 or not all(name in position for name in names):
        raise InvalidInputError(
            f"policy early-exit: this model has no exits, but {len(names)} outputs of shapes "
            f"{[['requests', *shape[1:]] for shape in shapes]}; needed are two or more of [requests, classes], in the "
            "order of their stages; or take another policy"
        )
    cuts: list[int] = []
    for name in names[:-1]:
        after = max(position[name] + 1, cuts[-1] + 1 if cuts else 1)
        cut = next((cut for cut in program.allowed_cuts if cut >= after), None)
        if cut is None or cut > position[names[-1]]:
            raise InvalidInputError(
                f"policy early-exit: nothing is left to compute behind the exit {name!r}: give the outputs in the "
                "order of their stages"
            )
        cuts.append(cut)
    return names, cuts
