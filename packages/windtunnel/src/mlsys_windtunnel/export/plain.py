"""Objects as plain JSON and tensors, and back, without running anything that the data names.

What pickles as plain state (modules, look-ups, the front's records) is written as its type and that state, both by
names of their own (``names.py``); no module class does anything for it. Reading makes an empty object of a class from
an allow-list and fills it (``plain_reader.py``): no constructor and no untrusted code runs. ``artifact.py`` puts this
in a folder, ``pt2.py`` beside an exported program. JSON is looked at by ``graph.schema.json`` before anything is made.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_windtunnel.export.names import field_name, type_name
from mlsys_windtunnel.export.plain_reader import (
    ARRAY_KINDS,
    CONTAINERS,
    DAMAGE,
    MODULE_FIELDS,
    TAG,
    Reader,
    class_path,
    is_allowed,
)

__all__ = ["DAMAGE", "Reader", "Writer"]

INLINE_ITEMS = 32  # longer arrays of numbers go to the tensors, where there are any
_LOAD_HOOKS = "_load_state_dict_post_hooks"  # of which modules have their own: functions of their module


class Writer:
    """Writer of objects as JSON values.

    Args:
        keep_arrays: Write arrays as JSON, however long; else they go to :attr:`tensors` as tensors do.

    Attributes:
        tensors: Tensors that the JSON refers to, by name; names of a module's tensors are those of its state dict.
    """

    def __init__(self, *, keep_arrays: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}  # by identity; the tensor is held, so that no other takes it
        self._keep_arrays = keep_arrays

    def write(self, value: Any, where: str = "") -> Any:
        """Return the JSON value for ``value``; ``where`` names it in messages and tensors.

        Raises:
            InvalidInputError: it, or something within it, is no plain data and of no allowed class.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
        if isinstance(value, list):
            return [self.write(item, _join(where, index)) for index, item in enumerate(value)]
        if type(value) is tuple:
            return {TAG: "tuple", "items": self.write(list(value), where)}
        if isinstance(value, frozenset | set):
            return {TAG: type(value).__name__, "items": self.write(sorted(value, key=repr), where)}
        if isinstance(value, Mapping):
            if all(type(key) is str for key in value) and TAG not in value:
                return {key: self.write(item, _join(where, key)) for key, item in value.items()}
            pairs = [[self.write(key, where), self.write(item, _join(where, key))] for key, item in value.items()]
            return {TAG: "dict", "items": pairs}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, torch.dtype):
            return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if type(value).__name__ == "NAType":
            return {TAG: "pandas.NA"}
        if isinstance(value, Enum):
            return {TAG: "enum", "type": self._class(type(value), where), "name": value.name}
        if isinstance(value, nn.Module):
            return self._module(value, where)
        kind = self._class(type(value), where)
        state = {field_name(kind, name): item for name, item in _state(value).items()}
        return {TAG: "object", "type": kind, "state": self.write(state, where)}

    def _module(self, module: nn.Module, where: str) -> dict[str, Any]:
        state = _state(module)
        hooks = [name for name in MODULE_FIELDS if name.endswith("_hooks") and state.get(name) and name != _LOAD_HOOKS]
        if hooks:
            raise InvalidInputError(f"{where or 'the module'} has hooks ({', '.join(hooks)}), which cannot be saved")
        kind = self._class(type(module), where)
        written: dict[str, Any] = {TAG: "module", "type": kind}

        def write_all(parts: Mapping[str, Any]) -> dict[str, Any]:
            named = {field_name(kind, name): part for name, part in parts.items()}
            return {name: self.write(part, _join(where, name)) for name, part in named.items()}

        if state[_LOAD_HOOKS]:
            written["load_hooks"] = [self._class(hook, where) for hook in state[_LOAD_HOOKS].values()]
        for group, part in (("parameters", module._parameters), ("buffers", module._buffers)):
            if part:
                written[group] = write_all(part)
        if module._non_persistent_buffers_set:
            written["not_persistent"] = sorted(field_name(kind, name) for name in module._non_persistent_buffers_set)
        others = {name: value for name, value in state.items() if name not in MODULE_FIELDS}
        if others:
            written["state"] = self.write({field_name(kind, name): item for name, item in others.items()}, where)
        if module._modules:
            written["modules"] = write_all(module._modules)
        return written

    def _tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        name, _ = self._names.setdefault(id(tensor), (where, tensor))  # one that is shared is written once
        if name not in self.tensors:
            self.tensors[name] = tensor.detach().cpu().clone().contiguous()
        written: dict[str, Any] = {
            TAG: "tensor",
            "name": name,
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
        }
        if isinstance(tensor, nn.Parameter):
            written["trainable"] = tensor.requires_grad
        return written

    def _array(self, array: Any, where: str) -> dict[str, Any]:
        if array.dtype.kind in "biuf" and array.size > INLINE_ITEMS and not self._keep_arrays:
            return {TAG: "array", "tensor": self._tensor(torch.from_numpy(np.array(array)), where)}
        flat = array.ravel() if isinstance(array, np.ndarray) else np.asarray(array).ravel()
        if array.dtype.kind in "mM":
            flat = flat.view(np.int64)
        elif array.dtype.kind == "S":
            flat = flat.astype(str)
        elif array.dtype.kind not in (*ARRAY_KINDS, "O"):
            raise InvalidInputError(f"{where or 'the value'} is an array of {array.dtype}, which cannot be saved")
        kind = "array" if isinstance(array, np.ndarray) else "scalar"
        items = self.write(flat.tolist(), where)
        return {TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "items": items}

    def _class(self, cls: Any, where: str) -> str:
        """Return the name for files of a class, or of a function."""
        path = next((path for path, container in CONTAINERS.items() if container is cls), class_path(cls))
        if path not in CONTAINERS and not is_allowed(cls.__module__):
            raise InvalidInputError(
                f"{where or 'the value'} is a {path}, which cannot be saved as plain data; only WindTunnel's own "
                "classes can, and those of a plugin that registers its converter"
            )
        return type_name(path)


def _state(value: Any) -> Any:
    """Return a record's fields by name, else the state that pickle would keep."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value.__getstate__()


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


_SURROGATE = re.compile(r"\\ud[89a-f][0-9a-f]{2}")


def check_schema(found: dict[str, Any], what: Literal["graph", "program"], path: Path) -> None:
    """Look at a file's JSON.

    Raises:
        InvalidInputError: It is none by the schema; the message names the place.
    """
    try:
        error = next(_validator(what).iter_errors(found), None)
    except UnicodeEncodeError:  # half a surrogate pair, which categories may have and the validator cannot read
        error = next(_validator(what).iter_errors(json.loads(_SURROGATE.sub("?", json.dumps(found)))), None)
    if error is not None:
        place = "/".join(map(str, error.instance_path)) or "the whole"
        is_not = "it does not describe a module" if what == "graph" else "its description is damaged"
        raise InvalidInputError(f"{path} is damaged: {is_not} ({place:.200}: {error.message:.200})")


@lru_cache(maxsize=2)
def _validator(what: str) -> Any:
    text = resources.files("mlsys_windtunnel.export").joinpath("graph.schema.json").read_text(encoding="utf-8")
    schema = json.loads(text)
    return jsonschema_rs.Draft202012Validator({**schema, "$ref": f"#/$defs/{what}"})
