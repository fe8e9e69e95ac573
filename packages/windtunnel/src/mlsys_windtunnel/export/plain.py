"""Objects as plain JSON and tensors, and back, without running anything that the data names.

What pickles as plain state (modules, look-ups, the front's records) is written as its type and that state, both by
names of their own (``names.py``); no module class does anything for it. Reading makes an empty object of a class from
an allow-list and fills it: no constructor and no untrusted code runs. ``artifact.py`` puts this in a folder, ``pt2.py``
beside an exported program.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.plugins import installed_plugins
from mlsys_core.plugins.specs import ConverterSpec
from torch import Tensor, nn

from mlsys_windtunnel.export.names import attribute_of, field_name, path_of, type_name
from mlsys_windtunnel.export.renamed import current_path, current_state

OWN_MODULES = tuple(
    f"mlsys_windtunnel.{name}"
    for name in (
        "backends.soft",
        "checks",
        "convert",
        "finetune.residual",
        "frontend",
        "host",
        "modules",
        "parse.graph",
    )
)
CONTAINERS = {
    f"torch.nn:{cls.__name__}": cls
    for cls in (nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Sequential)
}
ARRAY_KINDS = "biufUSmM"  # dtype kinds of numpy arrays and scalars that plain data holds
MOST_ITEM_BYTES = 1 << 16
INLINE_ITEMS = 32  # longer arrays of numbers go to the tensors, where there are any
# What reading JSON that is no writer's work can raise, beside InvalidInputError.
DAMAGE = (AttributeError, ImportError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
_LOAD_HOOKS = "_load_state_dict_post_hooks"  # of which modules have their own: functions of their module
_MODULE_FIELDS = frozenset(vars(nn.Module()))
_TAG = "$"  # the key that tells a tagged value from a plain dictionary


class Writer:
    """Writer of objects as JSON values.

    Args:
        packages: Packages beside WindTunnel's own whose classes may be written.
        keep_arrays: Write arrays as JSON, however long; else they go to :attr:`tensors` as tensors do.

    Attributes:
        tensors: Tensors that the JSON refers to, by name; names of a module's tensors are those of its state dict.
    """

    def __init__(self, *, packages: tuple[str, ...] = (), keep_arrays: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, tuple[str, Tensor]] = {}  # by identity; the tensor is held, so that no other takes it
        self._packages = packages
        self._keep_arrays = keep_arrays

    def write(self, value: Any, where: str = "") -> Any:
        """Return the JSON value for ``value``; ``where`` names it in messages and tensors.

        Raises:
            InvalidInputError: it, or something within it, is no plain data and of no allowed class.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if isinstance(value, list):
            return [self.write(item, _join(where, index)) for index, item in enumerate(value)]
        if type(value) is tuple:
            return {_TAG: "tuple", "items": self.write(list(value), where)}
        if isinstance(value, frozenset | set):
            return {_TAG: type(value).__name__, "items": self.write(sorted(value, key=repr), where)}
        if isinstance(value, Mapping):
            if all(type(key) is str for key in value) and _TAG not in value:
                return {key: self.write(item, _join(where, key)) for key, item in value.items()}
            pairs = [[self.write(key, where), self.write(item, _join(where, key))] for key, item in value.items()]
            return {_TAG: "dict", "items": pairs}
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, torch.dtype):
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if type(value).__name__ == "NAType":
            return {_TAG: "pandas.NA"}
        if isinstance(value, Enum):
            return {_TAG: "enum", "type": self._class(type(value), where), "name": value.name}
        if isinstance(value, nn.Module):
            return self._module(value, where)
        kind = self._class(type(value), where)
        state = {field_name(kind, name): item for name, item in _state(value).items()}
        return {_TAG: "object", "type": kind, "state": self.write(state, where)}

    def _module(self, module: nn.Module, where: str) -> dict[str, Any]:
        state = _state(module)
        hooks = [name for name in _MODULE_FIELDS if name.endswith("_hooks") and state.get(name) and name != _LOAD_HOOKS]
        if hooks:
            raise InvalidInputError(f"{where or 'the module'} has hooks ({', '.join(hooks)}), which cannot be saved")
        kind = self._class(type(module), where)
        written: dict[str, Any] = {_TAG: "module", "type": kind}

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
        others = {name: value for name, value in state.items() if name not in _MODULE_FIELDS}
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
            _TAG: "tensor",
            "name": name,
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
        }
        if isinstance(tensor, nn.Parameter):
            written["trainable"] = tensor.requires_grad
        return written

    def _array(self, array: Any, where: str) -> dict[str, Any]:
        if array.dtype.kind in "biuf" and array.size > INLINE_ITEMS and not self._keep_arrays:
            return {_TAG: "array", "tensor": self._tensor(torch.from_numpy(np.array(array)), where)}
        flat = array.ravel() if isinstance(array, np.ndarray) else np.asarray(array).ravel()
        if array.dtype.kind in "mM":
            flat = flat.view(np.int64)
        elif array.dtype.kind == "S":
            flat = flat.astype(str)
        elif array.dtype.kind not in (*ARRAY_KINDS, "O"):
            raise InvalidInputError(f"{where or 'the value'} is an array of {array.dtype}, which cannot be saved")
        kind = "array" if isinstance(array, np.ndarray) else "scalar"
        items = self.write(flat.tolist(), where)
        return {_TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "items": items}

    def _class(self, cls: Any, where: str) -> str:
        """Return the name for files of a class, or of a function."""
        path = next((path for path, container in CONTAINERS.items() if container is cls), class_path(cls))
        if path not in CONTAINERS and not _is_allowed(cls.__module__, self._packages):
            raise InvalidInputError(
                f"{where or 'the value'} is a {path}, which cannot be saved as plain data; only WindTunnel's own "
                "classes can, and those of packages named with packages=(...)"
            )
        return type_name(path)


class Reader:
    """Reader of objects that :class:`Writer` wrote.

    Args:
        tensors: Tensors that the JSON refers to.
        packages: Packages beside WindTunnel's own whose classes may be made; they are imported.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, packages: tuple[str, ...] = ()) -> None:
        self._tensors = tensors
        self._packages = packages
        self._made: dict[str, Tensor] = {}
        self._tags: dict[str, Callable[[dict[str, Any]], Any]] = {
            "array": self._array,
            "dict": lambda written: {self.read(key): self.read(item) for key, item in written["items"]},
            "dtype": lambda written: _checked(getattr(torch, written["name"]), torch.dtype),
            "enum": lambda written: _checked(self._class(_path(written), Enum)[written["name"]], Enum),
            "float": lambda written: float(_checked(written["value"], str)),
            "frozenset": lambda written: frozenset(self.read(written["items"])),
            "module": self._module,
            "object": self._object,
            "pandas.NA": lambda _: _pandas_na(),
            "scalar": lambda written: self._array(written)[()],
            "set": lambda written: set(self.read(written["items"])),
            "tensor": self._tensor,
            "tuple": lambda written: tuple(self.read(written["items"])),
        }

    def read(self, written: Any) -> Any:
        """Return the object that was written.

        Raises:
            InvalidInputError: it names an unknown class or tensor, or a tensor of another shape or dtype.
            Exception: of :data:`DAMAGE`, if it is no such JSON; callers make one message of these.
        """
        if isinstance(written, list):
            return [self.read(item) for item in written]
        if not isinstance(written, dict):
            return written
        if _TAG not in written:
            return {key: self.read(value) for key, value in written.items()}
        return self._tags[written[_TAG]](written)

    def _module(self, written: dict[str, Any]) -> nn.Module:
        kind = written.get("type", "")  # files before version 3 have a path, and attributes as Python called them
        cls = self._class(_path(written), nn.Module)
        module: nn.Module = cls.__new__(cls)
        nn.Module.__init__(module)
        for name, tensor in written.get("parameters", {}).items():
            module.register_parameter(attribute_of(kind, name), self.read(tensor))
        transient = set(written.get("not_persistent", ()))
        for name, tensor in written.get("buffers", {}).items():
            module.register_buffer(attribute_of(kind, name), self.read(tensor), persistent=name not in transient)
        for name, part in written.get("modules", {}).items():
            module.add_module(attribute_of(kind, name), self.read(part))
        _fill(module, _attributes(kind, self.read(written.get("state", {}))))
        for path in written.get("load_hooks", ()):
            hook = self._own(path_of(path), FunctionType)
            module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
        return module

    def _object(self, written: dict[str, Any]) -> Any:
        cls = self._class(_path(written), object)
        made = cls.__new__(cls)
        state = _attributes(written.get("type", ""), self.read(written["state"]))
        _fill(made, current_state(class_path(cls), state))
        return made

    def _tensor(self, written: dict[str, Any]) -> Tensor:
        name = written["name"]
        if name not in self._tensors:
            raise InvalidInputError(f"there is no tensor {name!r}")
        tensor = self._tensors[name]
        if str(tensor.dtype) != written["dtype"] or list(tensor.shape) != written["shape"]:
            raise InvalidInputError(
                f"the tensor {name!r} is {tensor.dtype} of shape {list(tensor.shape)}; "
                f"{written['dtype']} of shape {written['shape']} is needed"
            )
        if name not in self._made:
            is_parameter = "trainable" in written
            self._made[name] = nn.Parameter(tensor, bool(written["trainable"])) if is_parameter else tensor
        return self._made[name]

    def _array(self, written: dict[str, Any]) -> Any:
        if "tensor" in written:
            return self.read(written["tensor"]).numpy()
        dtype = np.dtype(written["dtype"])
        items = self.read(written["items"])
        if dtype.itemsize > MOST_ITEM_BYTES:
            raise InvalidInputError(f"arrays of {dtype} are not allowed: an item takes {dtype.itemsize:,} bytes")
        if dtype.kind == "O":
            array = np.empty(len(items), object)
            array[:] = items
        elif dtype.kind not in ARRAY_KINDS:
            raise InvalidInputError(f"arrays of {dtype} are not allowed")
        else:
            array = np.array(items, np.int64 if dtype.kind in "mM" else dtype)
            array = array.view(dtype) if dtype.kind in "mM" else array
        return array.reshape(written["shape"])

    def _class(self, path: str, base: type) -> Any:
        cls: type = CONTAINERS.get(path) or self._own(path, type)
        if not issubclass(cls, base):
            raise InvalidInputError(f"{path!r} is not what is needed here: a {base.__name__}")
        return cls

    def _own(self, path: str, kind: type) -> Any:
        """Return the class or function that an allowed module defines under this path."""
        path = current_path(path)
        module_name, _, name = path.partition(":")
        if not _is_allowed(module_name, self._packages):
            raise InvalidInputError(
                f"{path!r} is no class of WindTunnel's; if you trust this file and that package, allow it with "
                "packages=(...)"
            )
        try:
            found = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise InvalidInputError(f"there is no class {path!r} in this version ({error})") from error
        if not isinstance(found, kind) or class_path(found) != path:
            raise InvalidInputError(f"{path!r} is not what is needed here: a {kind.__name__}")
        return found


def class_path(cls: Any) -> str:
    """Return ``"package.module:Name"`` of a class or a function."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _is_allowed(module_name: str, packages: tuple[str, ...]) -> bool:
    allowed = (*OWN_MODULES, *packages, *converter_modules())
    return any(module_name == name or module_name.startswith(f"{name}.") for name in allowed)


@lru_cache(maxsize=1)
def converter_modules() -> frozenset[str]:
    """Return the modules of the converters that installed plugins registered; their operators may be saved and read."""
    specs = installed_plugins().registry.all(ConverterSpec)
    return frozenset(spec.factory.partition(":")[0] for spec in specs)


def _path(written: dict[str, Any]) -> str:
    """Return the path of the class of a record: by its type, or as files before version 3 have it."""
    return path_of(_checked(written["type"], str)) if "type" in written else written["class"]


def _attributes(kind: str, state: Any) -> Any:
    """Return a record's state by the attributes that hold it today."""
    return {attribute_of(kind, name): item for name, item in _checked(state, dict).items()}


def _state(value: Any) -> Any:
    """Return a record's fields by name, else the state that pickle would keep."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return value.__getstate__()


def _fill(made: Any, state: Any) -> None:
    """Give an empty object its state; no name may hide a method or, of a module, what holds its tensors."""
    cls = type(made)
    held = _MODULE_FIELDS if isinstance(made, nn.Module) else frozenset()
    bad = [name for name in _checked(state, dict) if name in held or callable(getattr(cls, name, None))]
    if is_dataclass(cls):
        bad += state.keys() ^ {each.name for each in fields(cls)}
    if bad:
        raise InvalidInputError(f"{class_path(cls)} lacks {', '.join(map(repr, bad))}, or cannot be given it")
    if is_dataclass(cls):
        for name, value in state.items():
            object.__setattr__(made, name, value)  # past a frozen record's own
    elif getattr(cls, "__setstate__", None) not in (None, nn.Module.__setstate__):
        made.__setstate__(vars(made) | state)
    else:
        vars(made).update(state)


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _pandas_na() -> object:
    import pandas as pd

    return pd.NA


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)
