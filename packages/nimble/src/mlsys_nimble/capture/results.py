"""Origins of a call's results: outputs of the program, or views of outputs, arguments and constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mlsys_nimble.backends.reference.operators import aten_function, compile_operator
from mlsys_nimble.backends.table import Run
from mlsys_nimble.capture.aliases import Member, is_known, overlap
from mlsys_nimble.capture.builder import Ref
from mlsys_nimble.capture.tracer import Tracer
from mlsys_nimble.capture.watched import Read
from mlsys_nimble.errors import refuse
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.operators import VIEWS, Aten, Copy
from mlsys_nimble.ir.program import Operator, Program, ValueType

_ADVICE = "Return a tensor of its own, y.clone(), or prepare with fallback='eager'."


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one tensor of the results."""

    kind: Literal["output", "input", "constant"]
    number: int  # index among the program's outputs or inputs, or the constant's value id
    steps: tuple[Run, ...] = ()  # views between that tensor and the result


@dataclass(frozen=True, slots=True)
class Results:
    """Recipe for a call's results from a program's outputs."""

    spec: trees.Spec  # pytree of (result of forward, attributes of each changed argument)
    leaves: tuple[Any, ...]  # None where tensors go ...
    tensor_indices: tuple[int, ...]  # ... and their indices
    origins: tuple[Origin, ...]  # one for each of these tensors
    changed: tuple[int, ...]  # numbers of the objects among the arguments that forward has changed
    is_plain: bool  # the tensors are the program's outputs, in order

    def build(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], program: Program, objects: list[Any]) -> Any:
        """Return what forward returns, and change the objects among the arguments as forward does.

        Args:
            outputs: Outputs of the program.
            inputs: Inputs of the program, after its writes to them.
            program: Program that holds the constants.
            objects: Objects among the arguments, in the order of :func:`~mlsys_nimble.ir.trees.flatten`.
        """
        leaves = list(self.leaves)
        if self.is_plain:
            for index, tensor in zip(self.tensor_indices, outputs, strict=True):
                leaves[index] = tensor
        else:
            sources: dict[str, Any] = {"output": outputs, "input": inputs, "constant": program.constants}
            made: dict[int, Tensor] = {}  # by id of the origin: a tensor that appears twice is one
            with torch.no_grad():
                for index, origin in zip(self.tensor_indices, self.origins, strict=True):
                    if id(origin) not in made:
                        tensor = sources[origin.kind][origin.number]
                        for step in origin.steps:
                            tensor = step(tensor)
                        made[id(origin)] = tensor
                    leaves[index] = made[id(origin)]
        result, states = trees.unflatten(leaves, self.spec, list(objects))
        for number, state in zip(self.changed, states, strict=True):
            trees.set_attributes(objects[number], state)
        return result


def find_results(
    result: Any,
    objects: Sequence[Any],
    changed: Sequence[int],
    tracer: Tracer,
    inputs: Sequence[Ref],
    *,
    separates: bool,
) -> tuple[Results, list[Ref]]:
    """Find the origin of each tensor in a captured run's result, and the outputs that the program needs.

    Raises:
        CaptureError: no replay can make a result.
    """
    known = {id(item): number for number, item in enumerate(objects)}
    states = [trees.attributes_of(objects[number]) for number in changed]
    flat = trees.flatten((result, states), known)
    tensor_indices = [index for index, leaf in enumerate(flat.leaves) if isinstance(leaf, Tensor)]
    for leaf in flat.leaves:
        if not trees.is_plain(leaf):
            what = f"a result of class {type(leaf).__module__}.{type(leaf).__qualname__}"
            raise refuse(what, "", "Return tensors, in tuples, lists, dictionaries or dataclasses.")
    finder = _Finder(tracer, inputs, [flat.leaves[index] for index in tensor_indices])
    find = finder.separate if separates else finder.origin
    origins = tuple([find(flat.leaves[index]) for index in tensor_indices])
    leaves = [None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in flat.leaves]
    is_plain = all(o.kind == "output" and not o.steps and o.number == n for n, o in enumerate(origins))
    is_plain = is_plain and len(finder.outputs) == len(origins)
    return Results(flat.spec, tuple(leaves), tuple(tensor_indices), origins, tuple(changed), is_plain), finder.outputs


_ALIAS: Run = torch.ops.aten.alias.default  # another tensor of the same memory, as detach() and x.view(x.shape) give


class _Finder:
    def __init__(self, tracer: Tracer, inputs: Sequence[Ref], results: Sequence[Tensor]) -> None:
        self._tracer = tracer
        self._inputs = {ref.value: number for number, ref in enumerate(inputs)}
        self._results = results
        self._known: dict[int, Origin] = {}
        self._bases: dict[int, int] = {}  # index of the output that is a group's base, by id of the group
        self._taken: set[int] = set()  # values that results lie in
        self.outputs: list[Ref] = []

    def origin(self, tensor: Tensor) -> Origin:
        """Return the origin of a tensor of the results; a tensor that appears twice has one origin."""
        if id(tensor) not in self._known:
            self._known[id(tensor)] = self._find(tensor)
        return self._known[id(tensor)]

    def separate(self, tensor: Tensor) -> Origin:
        """Add an output for this tensor alone; an input or constant, written to or not, stays that very tensor."""
        root = next((ref for root, ref in self._tracer.roots() if root is tensor), None)
        return self._output(root or self._tracer.ref(tensor))

    def _find(self, tensor: Tensor) -> Origin:
        tracer = self._tracer
        ref = tracer.ref(tensor)
        member = tracer.member(tensor)
        root = tracer.root_of(member)
        if root is not None:
            is_itself = any(tensor is own for own, _ in tracer.roots())
            steps = _runs(member, root.type) if member.steps else () if is_itself else (_ALIAS,)
            if root.value in self._inputs:
                return Origin("input", self._inputs[root.value], steps)
            return Origin("constant", root.value, steps)
        others = [other for other in self._results if other is not tensor and overlap(other, tensor)]
        if not others:
            return self._output(self._own(ref))
        group = member.group
        if id(group) not in self._bases:
            self._bases[id(group)] = self._output(self._own(group.base)).number
        origin = Origin("output", self._bases[id(group)], _runs(member, group.base.type))
        return replace(origin, steps=(_ALIAS,)) if origin in self._known.values() else origin

    def _own(self, ref: Ref) -> Ref:
        """Return a value in memory of its own, a copy where it is that of an input or of another result (y[:] = x)."""
        builder, value = self._tracer.builder, ref.value
        while (operator := builder.producer(Ref(value, ref.type))) and isinstance(operator.kind, VIEWS):
            value = operator.inputs[0]
        if value in self._taken or value in self._inputs or value in builder.constants:
            return builder.emit(Copy(), [ref], ref.type)
        self._taken.add(value)
        return ref

    def _output(self, ref: Ref) -> Origin:
        self.outputs.append(ref)
        return Origin("output", len(self.outputs) - 1)


def _runs(member: Member, base: ValueType) -> tuple[Run, ...]:
    """Return torch's operator for each step from the base to a view of it."""
    runs: list[Run] = []
    type_ = base
    for step in member.steps:
        if not is_known(step):
            raise refuse("a result that shares memory with an argument or another result", "", _ADVICE)
        if isinstance(step.kind, Aten):
            runs.append(_view(step.kind))
        else:
            runs.append(compile_operator(Operator("view", step.kind, (0,), (1,)), (type_, step.type)))
        type_ = step.type
    return tuple(runs)


_BITS = {"aten.neg.default": "aten._neg_view.default", "aten._conj_physical.default": "aten._conj.default"}


def _view(kind: Aten) -> Run:
    """Return torch's own view: a program computes signs and conjugates, which torch says by a bit of the tensor."""
    function = aten_function(_BITS.get(kind.target, kind.target))
    return lambda x: function(x, *kind.arguments[1:], **dict(kind.keywords))


def _plain(leaf: Any) -> Any:
    return int(leaf) if isinstance(leaf, Read) else leaf  # noted: another size is another result
