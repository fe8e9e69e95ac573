"""Devices that run planned work: ``get_device("cpu")`` or ``get_device("cuda:0")``; imports no torch.

Kinds of device come from the registry of plugins, the core's own among them. The rows of ``mlsys doctor`` are in
:mod:`mlsys_core.device.checks`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mlsys_core.device.protocols import Device, DeviceTimeoutError, Event, MemoryInfo, Stream
from mlsys_core.errors import InvalidInputError, PluginError
from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    import torch

    from mlsys_core.device.cpu import CpuDevice
    from mlsys_core.device.cuda import CudaDevice
    from mlsys_core.plugins import Registry
    from mlsys_core.plugins.specs import DeviceSpec

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "DeviceTimeoutError",
    "Event",
    "MemoryInfo",
    "Stream",
    "default_generator",
    "device_kind",
    "get_device",
    "run_on",
]

T = TypeVar("T")

__getattr__, __dir__ = lazy_exports(__name__, {"cpu": ["CpuDevice"], "cuda": ["CudaDevice"]})


_PARTS = ("name", "torch_name", "stream", "event", "synchronize", "memory_info")  # required of a plugin's device


def get_device(name: str, *, registry: Registry | None = None) -> Device:
    """Return the device called ``name``: ``"kind"`` or ``"kind:index"``; the default index is 0.

    Each call makes a new object; ``synchronize`` covers the streams of that object.

    Args:
        name: such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        registry: registry of device kinds; None: that of the installed plugins.

    Raises:
        InvalidInputError: the name is malformed or its kind unknown; the message lists what is allowed.
        DeviceError: the kind is known, the device is absent.
        PluginError: a plugin's device cannot be made, by a mistake of the plugin.

    Example:
        >>> get_device("cpu").name
        'cpu:0'
    """
    from mlsys_core.plugins.registry import failing_as

    found = _registry(registry)
    spec = device_kind(name, registry=found)
    device = found.part(spec)(int(name.partition(":")[2] or 0))
    with failing_as(spec, found):
        missing = [part for part in _PARTS if not hasattr(device, part)]
    if missing:
        raise PluginError(
            f"device {spec.name!r} of {found.owner(spec)}: its factory gave a {type(device).__name__}, which lacks "
            f"{missing[0]!r} of mlsys_core.device.Device"
        )
    made: Device = device
    return made


def run_on(device: Device, work: Callable[[], T]) -> T:
    """Run ``work`` on a stream of ``device`` and return what it gives, once the device is done; on the CPU at once.

    Whatever it raises is raised here.

    Example:
        >>> run_on(get_device("cpu"), lambda: 6 * 7)
        42
    """
    if device.kind == "cpu":
        return work()
    given: list[T] = []
    device.synchronize()  # its inputs may have been made on other streams
    with device.stream() as stream:
        stream.submit(lambda: given.append(work()))
        stream.synchronize()
    return given[0]


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that torch draws from on ``device`` where none is given; None if it has none.

    Example:
        >>> import torch
        >>> default_generator(torch.device("cpu")) is torch.default_generator
        True
    """
    import torch

    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return None


def device_kind(name: str, *, registry: Registry | None = None) -> DeviceSpec:
    """Return the registered kind of the device called ``name``, without checking that the device is present.

    Raises:
        InvalidInputError: the name is malformed or its kind unknown; the message lists what is allowed.

    Example:
        >>> device_kind("cuda:1").name
        'cuda'
    """
    from mlsys_core.plugins.specs import DeviceSpec

    kinds = {spec.name: spec for spec in _registry(registry).all(DeviceSpec)}
    match = re.fullmatch(r"([a-z][a-z0-9_-]*)(?::([0-9]+))?", name)
    if match is None or match[1] not in kinds:
        close = difflib.get_close_matches(name.partition(":")[0].lower(), kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        allowed = ", ".join(f"{kind}, {kind}:INDEX" for kind in kinds)
        raise InvalidInputError(f"device {name!r} is unknown: allowed are {allowed}{hint}")
    return kinds[match[1]]


def _registry(registry: Registry | None) -> Registry:
    from mlsys_core.plugins import installed_plugins  # here: plugins may import this package

    return installed_plugins().registry if registry is None else registry
