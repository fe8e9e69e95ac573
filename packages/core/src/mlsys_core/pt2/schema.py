"""Rebuild the JSON of a ``.pt2`` file from torch's own schema, field by field.

The walk follows the dataclasses of ``torch._export.serde.schema``: each value must have the field's type, and each
*text* must have a rule here, since text is what torch evaluates, imports, resolves or writes into generated code. A
text field without a rule, of a later torch say, refuses the file.

Inputs and outputs nest in tuples, lists and dicts only, so that nothing is imported: torch keeps the nesting as JSON
within JSON ("treespec"), in which an entry may name any enum of any module. Here it is written anew.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import math
import re
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.expressions import KEY, SYMBOL, guard, symbolic
from mlsys_core.pt2.operators import operator

_SEQUENCES = frozenset(
    {"builtins.tuple", "builtins.list", "torch.fx.immutable_collections.immutable_list", "torch.Size"}
)
_MAPPINGS = frozenset({"builtins.dict", "collections.OrderedDict", "torch.fx.immutable_collections.immutable_dict"})
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_MAX_NESTING = 64
_SPEC_VERSION = 1  # of torch's treespec


def structure(text: str) -> str:
    """Return a treespec written anew.

    Raises:
        InvalidInputError: it is damaged, or holds another container than a tuple, list or dict.
    """
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError("the structure of the inputs or outputs is damaged") from error
    if version != _SPEC_VERSION:
        raise InvalidInputError(
            f"the structure of the inputs or outputs is of version {version!r}, not {_SPEC_VERSION}"
        )
    return json.dumps([_SPEC_VERSION, _container(tree, _MAX_NESTING)])


def _container(tree: Any, depth: int) -> dict[str, Any]:
    if not isinstance(tree, dict) or depth == 0 or not isinstance(tree.get("children_spec"), list):
        raise InvalidInputError("the structure of the inputs or outputs is damaged")
    kind, children = tree.get("type"), tree["children_spec"]
    if kind is None and not children:
        return _LEAF
    if kind in _SEQUENCES:
        context = "null"
    elif kind in _MAPPINGS:
        context = json.dumps(_keys(tree.get("context"), len(children)))
    else:
        raise InvalidInputError(
            f"its inputs or outputs hold a {kind!r}, which only code can rebuild; "
            "export it with tuples, lists and dicts"
        )
    return {"type": kind, "context": context, "children_spec": [_container(child, depth - 1) for child in children]}


def _keys(context: Any, number: int) -> list[str | int]:
    try:
        keys = json.loads(context)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError("the structure of the inputs or outputs is damaged") from error
    if not isinstance(keys, list) or len(keys) != number:
        raise InvalidInputError("the structure of the inputs or outputs is damaged")
    for key in keys:
        if not (type(key) is int or (isinstance(key, str) and KEY.fullmatch(key))):
            raise InvalidInputError(f"its inputs or outputs have a dict with the key {key!r}; use letters and digits")
    return keys


_MAX_DEPTH = 256
_MAX_TEXT = 1 << 16
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
_PATH_PART = re.compile(r"(?!__)[A-Za-z0-9_][A-Za-z0-9_@: /\-]{0,255}")
_PAYLOAD = re.compile(r"(weight|tensor)_[0-9]{1,9}")
_WEB = re.compile(r"[A-Za-z0-9_.+<>= \-]{0,64}")
_VERIFIERS = frozenset({"", "ATEN", "TRAINING"})
_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu", "meta"})


def _identifier(text: str) -> str:
    if not _IDENTIFIER.fullmatch(text) or keyword.iskeyword(text) or text.startswith("__"):
        raise InvalidInputError(f"{text[:80]!r} is no name of a value")
    return text


def _maybe_identifier(text: str) -> str:
    return _identifier(text) if text else text


def _attribute_path(text: str) -> str:
    if len(text) > 2048 or not all(_PATH_PART.fullmatch(part) for part in text.split(".")):
        raise InvalidInputError(f"{text[:80]!r} is no name of a weight")
    return text


def _any_text(text: str) -> str:
    """Accept an operator's argument, such as "bilinear": torch quotes it."""
    if len(text) > _MAX_TEXT:
        raise InvalidInputError(f"a text of {len(text):,} characters is too long")
    return text


def _one_of(allowed: frozenset[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise InvalidInputError(f"{what} {text[:80]!r} is none of {', '.join(sorted(filter(None, allowed)))}")
        return text

    return check


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise InvalidInputError(f"{text[:80]!r} is no {what}")
        return text

    return check


def _range_name(text: str) -> str:
    return text if SYMBOL.fullmatch(text) else _any_range(text)


def _any_range(text: str) -> str:
    """Accept ``s0 + 1``, under which torch keeps the range of a derived size."""
    symbolic(text)
    return text


_RULES: dict[str, Callable[[str], str]] = {
    "Device.type": _one_of(_DEVICES, "device"),
    "SymExpr.expr_str": symbolic,
    "SymIntArgument.as_name": _identifier,
    "SymFloatArgument.as_name": _identifier,
    "SymBoolArgument.as_name": _identifier,
    "TensorArgument.name": _identifier,
    "GraphArgument.name": _identifier,
    "Argument.as_string": _any_text,
    "Argument.as_strings": _any_text,
    "Argument.as_operator": operator,
    "NamedArgument.name": _maybe_identifier,
    "Node.target": operator,
    "Node.name": _identifier,
    "Graph.tensor_values": _identifier,
    "Graph.sym_int_values": _identifier,
    "Graph.sym_bool_values": _identifier,
    "Graph.sym_float_values": _identifier,
    "ConstantValue.as_string": _any_text,
    "InputToConstantInputSpec.name": _maybe_identifier,
    "InputToParameterSpec.parameter_name": _attribute_path,
    "InputToBufferSpec.buffer_name": _attribute_path,
    "InputToTensorConstantSpec.tensor_constant_name": _attribute_path,
    "BufferMutationSpec.buffer_name": _attribute_path,
    "ParameterMutationSpec.parameter_name": _attribute_path,
    "GradientToParameterSpec.parameter_name": _attribute_path,
    "GradientToUserInputSpec.user_input_name": _identifier,
    "UserInputMutationSpec.user_input_name": _identifier,
    "ModuleCallEntry.fqn": _matching(re.compile(""), "path of the whole module"),
    "ModuleCallSignature.in_spec": structure,
    "ModuleCallSignature.out_spec": structure,
    "ModuleCallSignature.forward_arg_names": _identifier,
    "ExportedProgram.range_constraints": _range_name,
    "ExportedProgram.opset_version": _matching(KEY, "set of operators"),
    "ExportedProgram.verifiers": _one_of(_VERIFIERS, "dialect"),
    "ExportedProgram.torch_version": _matching(_WEB, "version"),
    "ExportedProgram.guards_code": guard,
    "PayloadConfig.config": _attribute_path,
    "PayloadMeta.path_name": _matching(_PAYLOAD, "file of a tensor"),
}
# Left out: for people and for tools that rebuild the modules, and a way to have torch import or resolve things.
_DROPPED = frozenset({"Node.metadata", "GraphModule.metadata", "GraphModule.treespec_namedtuple_fields"})
_REFUSED = {
    "CustomObjArgument": "a custom object, which is kept as a pickle",
    "InputToCustomObjSpec": "a custom object, which is kept as a pickle",
    "TokenArgument": "side effects",
    "InputTokenSpec": "side effects",
    "OutputTokenSpec": "side effects",
}
_NUMBERS_AS_TEXT = frozenset({"Infinity", "-Infinity", "NaN"})


def rebuild(root: Any, data: Any) -> Any:
    """Return ``data`` as an instance of the schema's dataclass ``root``.

    Args:
        root: One of ``torch._export.serde.schema``.
        data: The values of its JSON.

    Raises:
        InvalidInputError: a value of another type, a text that no rule takes, or an object that would need pickle.
    """
    from torch._export.serde import schema, serialize

    clean = _Walk(schema).value(root, data, root.__name__, 0)
    make: Callable[[Any, Any], Any] = serialize._dict_to_dataclass
    return make(root, clean)


class _Walk:
    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.hints: dict[Any, dict[str, Any]] = {}

    def value(self, kind: Any, data: Any, field_path: str, depth: int) -> Any:
        """Return ``data`` converted to the type ``kind``; ``field_path`` names the field that holds it."""
        if depth > _MAX_DEPTH:
            raise InvalidInputError("it is nested too deeply")
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return None if data is None else self.value(inner[0], data, field_path, depth)
        if origin is list:
            _require(isinstance(data, list), field_path, data)
            return [self.value(inner[0], each, field_path, depth + 1) for each in data]
        if origin is dict:
            _require(isinstance(data, dict), field_path, data)
            return {
                self.text(key, field_path): self.value(inner[1], each, field_path, depth + 1)
                for key, each in data.items()
            }
        if dataclasses.is_dataclass(kind):
            return self.record(kind, data, depth)
        return self.plain(kind, data, field_path)

    def record(self, kind: Any, data: Any, depth: int) -> dict[str, Any]:
        """Return a dataclass or one of its alternatives as a dict of its fields."""
        name = kind.__name__
        if name in _REFUSED:
            raise InvalidInputError(f"it has {_REFUSED[name]}")
        _require(isinstance(data, dict), name, data)
        if kind not in self.hints:
            self.hints[kind] = typing.get_type_hints(kind, vars(self.schema))
        hints = self.hints[kind]
        if issubclass(kind, self.schema._Union):
            _require(len(data) == 1 and next(iter(data)) in hints, name, data)
        made: dict[str, Any] = {}
        for field, hint in hints.items():
            field_path = f"{name}.{field}"
            if field_path in _DROPPED:
                made[field] = {}
            elif field_path == "GraphModule.module_call_graph":  # the first entry is the whole module
                _require(isinstance(data.get(field), list) and data[field], field_path, data.get(field))
                made[field] = self.value(hint, data[field][:1], field_path, depth + 1)
            elif field in data:
                made[field] = self.value(hint, data[field], field_path, depth + 1)
        return made

    def plain(self, kind: Any, data: Any, field_path: str) -> Any:
        """Return a number, truth value or text."""
        if kind is str:
            return self.text(data, field_path)
        if kind is bool:
            _require(isinstance(data, bool), field_path, data)
        elif kind is int or (isinstance(kind, type) and issubclass(kind, IntEnum)):
            _require(type(data) is int and abs(data) <= 1 << 64, field_path, data)
        elif kind is float:
            is_number = type(data) in (int, float) or (isinstance(data, str) and data in _NUMBERS_AS_TEXT)
            _require(is_number and not (type(data) is int and abs(data) > 1 << 64), field_path, data)
            return data if isinstance(data, str) or math.isfinite(data) else repr(data)
        else:
            raise InvalidInputError(f"{field_path} is of a kind that this version does not know ({kind})")
        return data

    def text(self, data: Any, field_path: str) -> str:
        """Return a text as written by its rule."""
        _require(isinstance(data, str), field_path, data)
        if field_path == "Argument.as_string_to_argument":
            return _identifier(data)
        rule = _RULES.get(field_path)
        if rule is None:
            raise InvalidInputError(f"it has {field_path}, which could name code")
        return rule(data)


def _require(is_right: object, field_path: str, data: Any) -> None:
    if not is_right:
        raise InvalidInputError(f"{field_path} is {repr(data)[:80]}")
