"""The reader of plain data: an empty object of an allowed class is made and filled; no constructor runs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
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

from mlsys_windtunnel.export.names import attribute_of, path_of

MOST_ITEM_BYTES = 1 << 16
PLUGIN = re.compile(r"mlsys_windtunnel_\w+")
# What reading JSON that is no writer's work can raise, beside InvalidInputError.
DAMAGE = (AttributeError, ImportError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
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
MODULE_FIELDS = frozenset(vars(nn.Module()))
TAG = "$"  # the key that tells a tagged value from a plain dictionary


def class_path(cls: Any) -> str:
    """Return ``"package.module:Name"`` of a class or a function."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_allowed(module_name: str) -> bool:
    """Return whether classes of a module may be written and read: WindTunnel's own, and registered converters'."""
    allowed = (*OWN_MODULES, *converter_modules())
    return any(module_name == name or module_name.startswith(f"{name}.") for name in allowed)


@lru_cache(maxsize=1)
def converter_modules() -> frozenset[str]:
    """Return the modules of the converters that installed plugins registered; their operators may be saved and read."""
    specs = installed_plugins().registry.all(ConverterSpec)
    return frozenset(spec.factory.partition(":")[0] for spec in specs)


class Reader:
    """Reader of objects that :class:`.Writer` wrote.

    Args:
        tensors: Tensors that the JSON refers to.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
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
        if TAG not in written:
            return {key: self.read(value) for key, value in written.items()}
        return self._tags[written[TAG]](written)

    def _module(self, written: dict[str, Any]) -> nn.Module:
        kind = written["type"]
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
        _fill(made, _attributes(written["type"], self.read(written["state"])))
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
        module_name, _, name = path.partition(":")
        if not is_allowed(module_name):
            plugin = PLUGIN.match(module_name)
            if plugin is not None:
                name = plugin[0].replace("_", "-")
                raise InvalidInputError(f"{path!r} is of a plugin that is not installed: pip install {name}")
            raise InvalidInputError(f"{path!r} is no class of WindTunnel's, or of an installed plugin's converter")
        try:
            found = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise InvalidInputError(f"there is no class {path!r} in this version ({error})") from error
        if not isinstance(found, kind) or class_path(found) != path:
            raise InvalidInputError(f"{path!r} is not what is needed here: a {kind.__name__}")
        return found


def _path(written: dict[str, Any]) -> str:
    """Return the path of the class of a record."""
    return path_of(_checked(written["type"], str))


def _attributes(kind: str, state: Any) -> Any:
    """Return a record's state by the attributes that hold it today."""
    return {attribute_of(kind, name): item for name, item in _checked(state, dict).items()}


def _fill(made: Any, state: Any) -> None:
    """Give an empty object its state; no name may hide a method or, of a module, what holds its tensors."""
    cls = type(made)
    if is_dataclass(cls):  # files are older than some fields, which have defaults
        state = {each.name: each.default for each in fields(cls) if each.default is not MISSING} | _checked(state, dict)
    held = MODULE_FIELDS if isinstance(made, nn.Module) else frozenset()
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
