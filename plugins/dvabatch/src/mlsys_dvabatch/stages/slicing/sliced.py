"""A program cut into stages: each a small module, with side inputs carried to the stages that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.queue import ServeRequest
from mlsys_dvabatch.stages.activations import Padded, to_host
from mlsys_dvabatch.stages.model import IsolationCheck
from mlsys_dvabatch.stages.slicing.partition import even_cuts
from mlsys_dvabatch.stages.slicing.program import Program
from mlsys_dvabatch.stages.slicing.shapes import vocabularies
from mlsys_serving.isolation import Draw, draw_like
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

MOST_TRIED = 256
THOROUGH_FLOPS = 50_000_000  # FLOP of a request, up to which isolation is checked at more batch sizes

Compile = Callable[[fx.GraphModule, tuple[Tensor, ...]], Callable[..., Any]]


class SlicedModel:
    """A model in stages; see :class:`~mlsys_dvabatch.stages.model.StageModel`.

    A request's payload is a tuple of arrays, one row of each input; its result one array, or a tuple where the model
    gives several. bfloat16 is float32 there.

    Args:
        program: what to cut.
        cuts: positions among its operators, rising, all allowed.
        compile_stage: a compiler of the registry, given each stage and example inputs; None runs them as they are.
        tolerance: Largest difference between the stages and the whole; compilers reorder sums.

    Attributes:
        example: a payload.
        may_be_missing: for each input, which elements of a row may be NaN: tried with it, the model answers finite
            numbers. Inputs of more than :data:`MOST_TRIED` numbers a row are not tried.

    Raises:
        InvalidInputError: a cut is not allowed, or the stages do not give what the whole model gives.
    """

    def __init__(
        self,
        program: Program,
        cuts: Sequence[int],
        *,
        compile_stage: Compile | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        self.program = program
        self.cuts = tuple(cuts)
        self.num_stages = len(cuts) + 1
        self.example = tuple(to_host(value[0].detach()) for value in program.example)
        self._given = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
        self.input_names = list(program.input_names) or self._given
        if not program.operators:
            raise InvalidInputError("the program has no operators: it returns what it is given")
        bounds = [0, *cuts, len(program.operators)]
        if any(left >= right for left, right in pairwise(bounds)):
            raise InvalidInputError(f"cuts {list(cuts)}: they must rise, inside 1 to {len(program.operators) - 1}")
        self._carried: list[list[str]] = []
        for cut in cuts:
            crossing = program.crossing(cut)
            if crossing is None:
                raise InvalidInputError(f"no cut is possible before operator {cut}: something without rows crosses it")
            self._carried.append([node.name for node in crossing])
        self._extents = [program.extents_crossing(cut) for cut in cuts]
        self._stages: list[Callable[..., Any]] = [self._stage(*pair) for pair in pairwise(bounds)]
        if compile_stage is not None:
            self._compile(compile_stage)
        self._check_equal(tolerance)
        self.may_be_missing = self._find_missing()
        self.isolation = IsolationCheck(
            "the model",
            self,
            num_inner=sum(map(len, self._carried)),
            is_short=program.flops > THOROUGH_FLOPS,
            followed=program.followed,
        )

    @property
    def tolerance(self) -> float:
        """Tolerance of the isolation check: that of the coarsest dtype within the model."""
        return self.program.rounding

    lengths: tuple[int, ...] = (1,)  # all requests have one shape

    def example_of(self, length: int) -> tuple[npt.NDArray[Any], ...]:
        """Return the example: all requests have its shape."""
        return self.example

    def draw(self) -> Draw:
        """Draw requests; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        is_wide = all(value.device.type == "cpu" for value in self.program.example)
        return draw_like(self.example, vocabularies(self.program.module), is_wide=is_wide)

    def answers(self, payloads: Sequence[Any]) -> list[list[npt.NDArray[Any]]]:
        """Return each request's arrays; see :class:`~mlsys_dvabatch.stages.model.Triable`."""
        values = self.collate([ServeRequest(str(number), each) for number, each in enumerate(payloads)], 1)
        columns = []
        for stage in range(self.num_stages):
            values = self.run(stage, values)
            columns += [to_host(value) for value in values.tensors.values()]
        if any(not column.ndim or len(column) != len(payloads) for column in columns):
            shapes = [list(column.shape) for column in columns]
            raise InvalidInputError(f"outputs {shapes} of {len(payloads)} requests: each needs a row for each request")
        return [[column[row, ...] for column in columns] for row in range(len(payloads))]

    def collate(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> Padded:
        """Stack the payloads, one row for each request."""
        return self.stacked([request.payload for request in requests])

    def stacked(self, payloads: Sequence[tuple[npt.NDArray[Any], ...]]) -> Padded:
        """Stack payloads of one shape."""
        columns = zip(*payloads, strict=True)
        stacked = (torch.from_numpy(np.stack(rows)) for rows in columns)
        named = zip(self._given, stacked, self.program.example, strict=True)
        return Padded({name: value.to(like.device, like.dtype) for name, value, like in named})

    def run(self, stage: int, values: Padded) -> Padded:
        """Run one stage."""
        given = self._given if not stage else self._carried[stage - 1]
        extents = self._extents[stage - 1] if stage else []
        outputs = self._stages[stage](*(values.tensors[name] for name in given), *(values.extents[n] for n in extents))
        if stage == self.num_stages - 1:
            return Padded({str(number): output for number, output in enumerate(several(outputs))})
        names, numbers = self._carried[stage], self._extents[stage]
        tensors = dict(zip(names, outputs[: len(names)], strict=True))
        return Padded(tensors, dict(zip(numbers, outputs[len(names) :], strict=True)))

    def results(self, values: Padded) -> list[Any]:
        """Return the rows of the outputs, copied out of their batch."""
        return self.results_of(values)

    @staticmethod
    def results_of(values: Padded) -> list[Any]:
        """Return the rows of tensors, copied out of their batch: arrays, or tuples where there are several."""
        columns = [to_host(value).copy() for value in values.tensors.values()]
        return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))

    def check(self, payload: Any) -> int:
        """Check that a request fits the model's inputs; its length is always 1.

        Raises:
            InvalidInputError: number, dtype, shape or values are wrong.
        """
        if not isinstance(payload, tuple) or len(payload) != len(self.example):
            raise InvalidInputError(f"a request is a tuple of {len(self.example)} arrays, got {type(payload).__name__}")
        for name, value, like, missing in zip(
            self.input_names, payload, self.example, self.may_be_missing, strict=True
        ):
            if not isinstance(value, np.ndarray) or value.dtype != like.dtype or value.shape != like.shape:
                got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
                raise InvalidInputError(f"input {name!r} takes {like.dtype} {list(like.shape)}, got {got}")
            if value.dtype.kind != "f" or (finite := np.isfinite(value)).all():
                continue
            if not (finite | (np.isnan(value) & missing)).all():
                what = "NaN where it means no missing value" if missing.any() else "NaN"
                raise InvalidInputError(f"input {name!r} holds {what}, or infinity: only finite values are taken")
        return 1

    def example_inputs(self, num: int) -> Padded:
        """Return the example ``num`` times, as one batch."""
        return Padded({n: torch.cat([v] * num) for n, v in zip(self._given, self.program.example, strict=True)})

    def _find_missing(self) -> list[npt.NDArray[np.bool_]]:
        """Return masks of the positions where NaN means a missing value, as it does to trees; one mask for each input.

        There answers stay finite when NaN is put in that position alone.
        """
        example = self.program.example
        found = [np.zeros(value.shape[1:], np.bool_) for value in example]
        for number, value in enumerate(example):
            if not value.is_floating_point() or value[0].numel() > MOST_TRIED:
                continue
            for flat_index in range(value[0].numel()):
                tried = [one[:1].clone() for one in example]
                tried[number].view(-1)[flat_index] = torch.nan
                found[number].flat[flat_index] = self._answers_finite(tried)
        return found

    def _answers_finite(self, example: Sequence[Tensor]) -> bool:
        try:
            with torch.no_grad():
                results = self.program.module(*example)
        except Exception:  # noqa: BLE001 - whatever it is, the model does not take such values
            return False
        numbers = [one for one in several(results) if isinstance(one, Tensor) and one.is_floating_point()]
        return bool(numbers) and all(bool(torch.isfinite(one).all()) for one in numbers)

    def _stage(self, begin: int, end: int) -> fx.GraphModule:
        """Return operators ``begin`` to ``end`` as a module of their own."""
        program, graph = self.program, fx.Graph()
        own = set(program.operators[begin:end])
        is_first, is_last = begin == 0, end == len(program.operators)
        given = self._given if is_first else self._carried[self.cuts.index(begin)]
        copies: dict[fx.Node, fx.Node] = {}
        by_name = {node.name: node for node in program.module.graph.nodes}
        for name in [*given, *([] if is_first else self._extents[self.cuts.index(begin)])]:
            copies[by_name[name]] = graph.placeholder(name)

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node.op == "get_attr":
                    copies[node] = graph.node_copy(node)
                else:  # a batch size from before: every input has it
                    assert node.name in program.batch_values
                    source = copies[by_name[given[0]]]
                    copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
            return copies[node]

        output = None
        for node in program.module.graph.nodes:
            if node in own:
                copies[node] = graph.node_copy(node, copy_of)
            elif node.op == "output":
                output = node
        assert output is not None
        if is_last:
            graph.output(fx.map_arg(output.args[0], copy_of))
        else:
            carried = [*self._carried[self.cuts.index(end)], *self._extents[self.cuts.index(end)]]
            graph.output(tuple(copies[by_name[name]] for name in carried))
        return fx.GraphModule(program.module, graph)

    def _compile(self, compile_stage: Compile) -> None:
        values = self.example_inputs(1)
        for stage in range(self.num_stages):
            module = self._stages[stage]
            assert isinstance(module, fx.GraphModule)
            given = self._given if not stage else self._carried[stage - 1]
            self._stages[stage] = compile_stage(module, tuple(values.tensors[name] for name in given))
            with torch.inference_mode():
                values = self.run(stage, values)

    def _check_equal(self, tolerance: float) -> None:
        with torch.inference_mode():
            values = self.example_inputs(2)
            expected, again = (self.program.module(*values.tensors.values()) for _ in range(2))
            for stage in range(self.num_stages):
                values = self.run(stage, values)

        if kinds := {type(one).__name__ for one in several(expected) if not isinstance(one, Tensor)}:
            named = ", ".join(sorted(kinds))
            raise InvalidInputError(f"the model returns {named} beside tensors: return a row for each request")

        def is_equal(left: Any, right: Any) -> bool:
            return all(
                one.dtype == other.dtype and torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
                for one, other in zip(several(left), several(right), strict=True)
            )

        if not is_equal(expected, again):
            raise InvalidInputError(
                "the model gives another answer when it is asked again: it draws random numbers or remembers earlier "
                "requests; export it in evaluation mode, without state"
            )
        if not is_equal(expected, list(values.tensors.values())):
            raise InvalidInputError(
                f"the {self.num_stages} stages do not give what the whole model gives (within {tolerance}): "
                "slice it elsewhere, or with another compiler"
            )


def several(outputs: Any) -> list[Any]:
    """Return the tensors of a result, in the order in which the graph has them; a missing one (None) is none."""
    return [leaf for leaf in tree_leaves(outputs) if leaf is not None]


def slice_evenly(program: Program, num_stages: int, *, compile_stage: Compile | None = None) -> SlicedModel:
    """Slice a program into stages of even measured time (a batch of 4)."""
    cuts = even_cuts(program.timed(4), program.allowed_cuts, num_stages)
    return SlicedModel(program, cuts, compile_stage=compile_stage)
