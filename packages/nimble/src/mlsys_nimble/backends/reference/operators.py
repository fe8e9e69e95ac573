"""Reference backend: every operator in torch, and the executor where there is no compiler.

:func:`compile_operator` makes an operator a function of tensors; the native executor runs operators without a kernel
by it. Arithmetic is torch's own, operator by operator, so a captured program gives the model's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mlsys_nimble.backends.table import Run, find
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from torch import Tensor


class ReferenceExecutor:
    """Executor that replays a program in torch; see :class:`~mlsys_nimble.backends.executor.Executor`."""

    copies: frozenset[ValueId] = frozenset()

    def __init__(self, program: Program, **_: Any) -> None:
        steps = enumerate(program.operators)
        last_use = {value: index for index, operator in steps for value in (*operator.inputs, *operator.outputs)}
        kept = program.kept() | set(program.constants) | set(program.inputs)
        self._program = program
        self._steps = []
        for index, operator in enumerate(program.operators):
            done = tuple({v for v in (*operator.inputs, *operator.outputs) if last_use[v] == index} - kept)
            self._steps.append((compile_operator(operator, program.values), operator.inputs, operator.outputs, done))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~mlsys_nimble.backends.executor.Executor`."""
        program = self._program
        with torch.no_grad():
            values: dict[ValueId, Tensor] = dict(program.constants)
            plain = [each.resolve_conj().resolve_neg() for each in inputs]
            values.update(zip(program.inputs, plain, strict=True))
            for run, arguments, results, done in self._steps:
                made = run(*[values[value] for value in arguments])
                made = [made] if isinstance(made, Tensor) else made
                values.update(zip(results, made, strict=True))
                for value in done:
                    del values[value]
            outputs = [values[value] for value in program.outputs]
            written = values | dict(zip(program.inputs, inputs, strict=True))
            _write_back([(written[old], values[new]) for old, new in program.mutations])
        return outputs


def _write_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each new value to its tensor. All are read before any is written: one may be a view of another's tensor."""
    news = [new if len(pairs) == 1 else new.clone() for _, new in pairs]
    for (old, _), new in zip(pairs, news, strict=True):
        old.copy_(new)


def compile_operator(operator: Operator, values: Sequence[ValueType]) -> Run:
    """Return a function from the operator's input tensors to its result."""
    if isinstance(operator.kind, kinds.Aten):
        return _aten(operator.kind)
    meaning = find(type(operator.kind)).meaning
    assert meaning is not None, f"no family of backends/operators gives {operator.kind} a meaning"
    return meaning(operator.kind, tuple(values[v] for v in operator.inputs), values[operator.outputs[0]])


def _aten(kind: kinds.Aten) -> Run:
    function = _view_dtype if kind.target == "aten.view.dtype" else aten_function(kind.target)

    def fill(item: Any, tensors: tuple[Tensor, ...]) -> Any:
        if isinstance(item, kinds.Input):
            return tensors[item.index]
        return [fill(part, tensors) for part in item] if isinstance(item, tuple) else item

    def run(*tensors: Tensor) -> Any:
        tensors = as_needed(kind, tensors)
        made = function(*(fill(a, tensors) for a in kind.arguments), **{k: fill(v, tensors) for k, v in kind.keywords})
        return made if isinstance(made, Tensor) else [part for part in made if part is not None]

    return run


def _view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same bytes as another dtype; torch itself takes row-major strides alone, also of one element."""
    if not x.dim() or dtype.itemsize == x.itemsize:
        return x.view(dtype)
    row = x.clone(memory_format=torch.contiguous_format).flatten().view(dtype)
    return row.reshape(*x.shape[:-1], x.shape[-1] * x.itemsize // dtype.itemsize)


def as_needed(kind: kinds.Aten, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs, copying those that must be row-major and are not: torch might misread them silently."""
    if all(tensors[index].is_contiguous() for index in kind.contiguous):
        return tensors
    return tuple([t.contiguous() if index in kind.contiguous else t for index, t in enumerate(tensors)])


def aten_function(target: str) -> Any:
    """Return the overload that a name such as ``"aten.topk.default"`` stands for; custom operators too."""
    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    return function
