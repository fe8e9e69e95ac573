"""Tensors that share memory, expressed in a program whose values are never written twice.

Tensors that share memory form a group with one *base*. A view remembers the steps that lead to it from the base; a
write to any member makes a new base value, and members read later are made from it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.layouts import Kin
from mlsys_nimble.errors import refuse
from mlsys_nimble.ir.operators import Aten, Input, Kind, Permute, Reshape, Slice
from mlsys_nimble.ir.program import ValueType


@dataclass(frozen=True, slots=True)
class ViewStep:
    """Operator between a base and its view."""

    kind: Kind
    type: ValueType  # the operator's result


@dataclass(slots=True, eq=False)
class Group:
    """Tensors that share memory."""

    base: Ref  # the current value
    version: int = 0  # writes so far
    kin: Kin = field(default_factory=Kin)


@dataclass(slots=True)
class Member:
    """Tensor of a group, with its value when last read."""

    group: Group
    steps: tuple[ViewStep, ...]  # views between the base and this tensor
    ref: Ref  # its value at `version` of the group
    version: int = 0


def read(member: Member, builder: Builder) -> Ref:
    """Return the member's current value."""
    if member.version != member.group.version:
        member.ref = _replay(member.group.base, member.steps, builder)[-1]
        member.version = member.group.version
    return member.ref


def write(member: Member, new: Ref, builder: Builder) -> None:
    """Set the member's value to ``new``, of its shape and dtype, and change the shared memory with it."""
    parents = _replay(member.group.base, member.steps, builder)
    child = new
    for parent, step in zip(reversed(parents[:-1]), reversed(member.steps), strict=True):
        child = _scatter(parent, step, child, builder)
    member.group.base = child
    member.group.version += 1
    member.group.kin.root().is_written = True
    member.ref, member.version = new, member.group.version


def steps_between(parent: Ref, child: Ref, builder: Builder) -> tuple[ViewStep, ...]:
    """Return the operators that lead from one value to another, each with one input."""
    steps: list[ViewStep] = []
    value = child.value
    while value != parent.value:
        operator = builder.producer(Ref(value, builder.values[value]))
        if operator is None or len(operator.inputs) != 1 or len(operator.outputs) != 1:
            return (ViewStep(Aten("aten.unknown_view", (Input(0),)), child.type),)
        steps.append(ViewStep(operator.kind, builder.values[value]))
        value = operator.inputs[0]
    return tuple(reversed(steps))


def _replay(base: Ref, steps: tuple[ViewStep, ...], builder: Builder) -> list[Ref]:
    refs = [base]
    for step in steps:
        if not is_known(step):
            raise refuse("a view of a tensor that has been written to in place", builder.site.source, _ADVICE)
        refs.append(builder.emit(step.kind, [refs[-1]], step.type))
    return refs


def _scatter(parent: Ref, step: ViewStep, child: Ref, builder: Builder) -> Ref:
    """Return ``parent`` with the part that the step shows replaced by ``child``."""
    match step.kind:
        case Reshape():
            return builder.reshape(child, parent.shape)
        case Permute(dims):
            inverse = sorted(range(len(dims)), key=dims.__getitem__)
            return builder.permute(child, inverse)
        case Slice(dim, start, 1):
            length = parent.shape[dim]
            end = start + child.shape[dim]
            before = [builder.slice(parent, dim, 0, start)] if start else []
            after = [builder.slice(parent, dim, end, length - end)] if end < length else []
            return builder.concat([*before, child, *after], dim)
        case Slice(dim, start, step_size):
            end = start + (child.shape[dim] - 1) * step_size + 1
            kind = Aten("aten.slice_scatter.default", (Input(0), Input(1), dim, start, end, step_size))
            return builder.emit(kind, [parent, child], parent.type)
        case Aten("aten.diagonal.default", (_, *where)):
            kind = Aten("aten.diagonal_scatter.default", (Input(0), Input(1), *where))
            return builder.emit(kind, [parent, child], parent.type)
        case Aten("aten.neg.default" | "aten._conj_physical.default"):  # a view by a bit: its own inverse
            return builder.emit(step.kind, [child], parent.type)
        case Aten("aten.view.dtype") if parent.dtype != "bool":  # whose bytes are 0 and 1 alone
            dtype: torch.dtype = getattr(torch, parent.dtype)
            return builder.emit(Aten("aten.view.dtype", (Input(0), dtype)), [child], parent.type)
        case Aten("aten.view_as_real.default"):
            return builder.emit(Aten("aten.view_as_complex.default", (Input(0),), (), (0,)), [child], parent.type)
    raise refuse(f"a write in place through {step.kind}", builder.site.source, _ADVICE)


_ADVICE = "Write the operation out of place (y = torch.where(...), not x[...] = ...), or prepare with fallback='eager'."


def is_known(step: ViewStep) -> bool:
    """Return whether the operator of a view step is known."""
    return not (isinstance(step.kind, Aten) and step.kind.target == "aten.unknown_view")


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors may have a byte in common, whatever their storages."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors lie in one storage."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.untyped_storage().nbytes() > 0


def shares_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have a byte in common: as ``x[::2]`` and ``x[1::2]`` have not."""
    if not shares_memory(one, other) or not overlap(one, other):
        return False
    marks = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool)
    _bytes_of(one, marks).fill_(True)
    return bool(_bytes_of(other, marks).any())


def _bytes_of(tensor: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    strides = [stride * tensor.itemsize for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, tensor.itemsize), (*strides, 1), tensor.storage_offset() * tensor.itemsize)
