"""Programs and calls as plain JSON, and back: only what is listed here can be written or read."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.operators import operator as tensor_operator

from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, Program, ValueType

_OF_TRAINING = (kinds.Gemm, kinds.WeightGradient, kinds.BatchNormTraining, kinds.BatchNormGradient)
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (*typing.get_args(kinds.Kind), kinds.Separable) if kind not in _OF_TRAINING
}
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_SCALARS = (bool, int, str, type(None))


def program_record(program: Program) -> dict[str, Any]:
    """Return a program without its constants' values as JSON.

    Raises:
        InvalidInputError: an operator cannot be written; the message has its name.
    """
    return {
        "values": [[each.dtype, list(each.shape)] for each in program.values],
        "operators": [
            [each.name, type(each.kind).__name__, _kind_record(each), list(each.inputs), list(each.outputs)]
            for each in program.operators
        ],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "mutations": [list(pair) for pair in program.mutations],
    }


def read_program(record: Mapping[str, Any]) -> Program:
    """Return the program of a record, without its constants; whether its types fit is still to be checked.

    Raises:
        ValueError: the record is no program.
        InvalidInputError: it names an operator of torch that computes no tensors.
    """
    integers = tuple[int, ...]
    return Program(
        values=tuple([ValueType(_read(integers, shape), _read(str, dtype)) for dtype, shape in record["values"]]),
        operators=tuple(
            [
                Operator(_read(str, name), _read_kind(kind, fields), _read(integers, inputs), _read(integers, outputs))
                for name, kind, fields, inputs, outputs in record["operators"]
            ]
        ),
        inputs=_read(integers, record["inputs"]),
        outputs=_read(integers, record["outputs"]),
        mutations=_read(tuple[tuple[int, int], ...], record["mutations"]),
    )


def _kind_record(operator: Operator) -> Any:
    kind = operator.kind
    if type(kind).__name__ not in _KINDS:
        raise InvalidInputError(f"{operator.name} ({type(kind).__name__}) cannot be saved: it belongs to training")
    if isinstance(kind, kinds.Aten):
        _check_target(kind.target)
    try:
        return _record(kind)
    except TypeError as error:
        raise InvalidInputError(
            f"{kind} ({operator.name}) cannot be saved: its argument {error} has no form in a file"
        ) from error


def _check_target(target: str) -> None:
    try:
        tensor_operator(f"torch.ops.{target}")
    except InvalidInputError as error:
        advice = "only operators of torch and torchvision that compute tensors can be in a file"
        raise InvalidInputError(f"{target[:120]} cannot be saved or loaded: {advice}") from error


def _record(item: Any) -> Any:
    """Return nested data as JSON; TypeError for what has no form."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        if isinstance(item, kinds.Input):
            return {"input": item.index}
        return [_record(getattr(item, each.name)) for each in dataclasses.fields(item)]
    if isinstance(item, tuple):
        return [_record(part) for part in item]
    if type(item) is float:
        return item if isfinite(item) else {"float": str(item)}
    if type(item) in _SCALARS:
        return item
    if type(item) is complex:
        return {"complex": [_record(item.real), _record(item.imag)]}
    for name, type_ in _NAMED.items():
        if isinstance(item, type_):
            return {name: str(item).removeprefix("torch.")}
    if item == torch.device("cpu"):
        return {"device": "cpu"}
    raise TypeError(f"of class {type(item).__name__}")


def _read_kind(name: str, fields: Any) -> Any:
    kind = _read(_KINDS[name], fields)
    if isinstance(kind, kinds.Aten):
        _check_target(kind.target)
    return kind


def _read(type_: Any, item: Any) -> Any:
    """Return JSON as a value of this type; ValueError if it is none."""
    return _reader(type_)(item)


@cache
def _reader(type_: Any) -> Callable[[Any], Any]:
    """Return what reads values of a type."""
    origin, parts = typing.get_origin(type_), typing.get_args(type_)
    if type_ is Any:
        return _read_any
    if origin is typing.Literal:
        return lambda item: item if isinstance(item, str) and item in parts else _refused(item)
    if origin is tuple and parts[1:] == (...,):
        every = _reader(parts[0])
        return lambda item: tuple([every(part) for part in item]) if type(item) is list else _refused(item)
    if origin is tuple:
        return _row_reader([_reader(part) for part in parts], lambda *read: read)
    if origin in (typing.Union, types.UnionType):
        return _union_reader([_reader(part) for part in parts])
    if dataclasses.is_dataclass(type_):
        hints, made = typing.get_type_hints(type_), typing.cast(Any, type_)
        return _row_reader([_reader(hints[each.name]) for each in dataclasses.fields(type_)], made)
    if type_ is float:
        return lambda item: item if type(item) is float else float(_special(item))
    return lambda item: item if type(item) is type_ else _refused(item)


def _row_reader(readers: Sequence[Callable[[Any], Any]], make: Callable[..., Any]) -> Callable[[Any], Any]:
    def read(item: Any) -> Any:
        parts = item if type(item) is list else _refused(item)
        return make(*[reader(part) for reader, part in zip(readers, parts, strict=True)])

    return read


def _union_reader(readers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(item: Any) -> Any:
        for reader in readers:
            with suppress(ValueError):
                return reader(item)
        return _refused(item)

    return read


def _refused(item: Any) -> Any:
    raise ValueError(f"{item!r:.60} is not what stands here")


def _read_any(item: Any) -> Any:
    """Return an argument of an operator that torch runs."""
    if isinstance(item, list):
        return tuple([_read_any(part) for part in item])
    if not isinstance(item, dict):
        return item
    ((key, value),) = item.items()
    if key == "input" and type(value) is int:
        return kinds.Input(value)
    if key == "float":
        return float(_special(item))
    if key == "complex":
        return complex(*[_read(float, part) for part in value])
    if key == "device" and value == "cpu":
        return torch.device("cpu")
    found = getattr(torch, value, None) if key in _NAMED and isinstance(value, str) else None
    if found is None or not isinstance(found, _NAMED[key]):
        raise ValueError(f"{item!r:.60} is no argument")
    return found


def _special(item: Any) -> str:
    """Return the text of a number that JSON has no form for."""
    text = item.get("float") if isinstance(item, dict) and len(item) == 1 else None
    return str(text if text in ("inf", "-inf", "nan") else _refused(item))


def tree_record(tree: Any, mark: Callable[[Any], int | None]) -> Any:
    """Return nested arguments or results as JSON.

    Args:
        tree: Tuples, lists, dictionaries with keys of text or integers, and leaves.
        mark: Return the number of a leaf that stands for a tensor, None for others.

    Raises:
        TypeError: something else is in it; the message is its class.
    """
    number = mark(tree)
    if number is not None:
        return {"tensor": number}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [tree_record(part, mark) for part in tree]}
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        return {"dict": [[key, tree_record(part, mark)] for key, part in tree.items()]}
    if type(tree) in (*_SCALARS, float):
        return {"is": _record(tree)}
    raise TypeError(f"{type(tree).__module__}.{type(tree).__qualname__}")


def read_tree(record: Any, tensor: Callable[[int], Any]) -> Any:
    """Return the tree of a record, with what ``tensor`` gives for each number.

    Raises:
        ValueError: the record is no tree.
    """
    ((key, value),) = record.items()
    if key == "tensor" and type(value) is int:
        return tensor(value)
    if key in ("tuple", "list"):
        parts = [read_tree(part, tensor) for part in value]
        return tuple(parts) if key == "tuple" else parts
    if key == "dict":
        return {_read(str | int, name): read_tree(part, tensor) for name, part in value}
    if key == "is":
        return _read(bool | int | float | str | None, value)
    raise ValueError(f"{record!r:.60} is no tree")
