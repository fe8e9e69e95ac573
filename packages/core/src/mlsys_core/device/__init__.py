"""Devices: where planned work runs. ``get_device("cpu")`` or ``get_device("cuda:0")``; nothing here imports torch.

The capability report for ``mlsys doctor`` is in :mod:`mlsys_core.device.capabilities`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from mlsys_core.device.cpu import CpuDevice
from mlsys_core.device.cuda import CudaDevice
from mlsys_core.device.protocols import Device, DeviceTimeoutError, Event, MemoryInfo, Stream
from mlsys_core.errors import InvalidInputError

__all__ = ["CpuDevice", "CudaDevice", "Device", "DeviceTimeoutError", "Event", "MemoryInfo", "Stream", "get_device"]

_BUILT_IN: Mapping[str, Callable[[int], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}


def get_device(name: str, *, factories: Mapping[str, Callable[[int], Device]] | None = None) -> Device:
    """The device called ``name``: ``"kind"`` or ``"kind:index"``; the index is 0 if left out.

    Each call makes a new object; ``synchronize`` covers the streams of that object.

    Args:
        name: such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        factories: further kinds, name to a callable of the index, as plugins register them (``DeviceSpec``).

    Raises:
        InvalidInputError: the name is malformed or its kind unknown (the message lists what is allowed), or a factory
            takes the name of a built-in kind.
        DeviceError: the kind is known, the device is absent.

    Example:
        >>> get_device("cpu").name
        'cpu:0'
    """
    extra = factories or {}
    if clash := sorted(_BUILT_IN.keys() & extra.keys()):
        raise InvalidInputError(f"the device kind {clash[0]!r} is built in: register the other one under another name")
    kinds = {**_BUILT_IN, **extra}
    match = re.fullmatch(r"([a-z][a-z0-9_-]*)(?::([0-9]+))?", name)
    if match is None or match[1] not in kinds:
        close = difflib.get_close_matches(name.partition(":")[0].lower(), kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        allowed = ", ".join(f"{kind}, {kind}:INDEX" for kind in kinds)
        raise InvalidInputError(f"device {name!r} is unknown: allowed are {allowed}{hint}")
    return kinds[match[1]](int(match[2] or 0))
