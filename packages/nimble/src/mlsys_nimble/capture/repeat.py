"""Watches a model a second time, on other values: what differs was not computed from its inputs by torch.

So random numbers of NumPy and Python, clocks, counters, and values that left torch and came back as constants are
refused, whichever way they took.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.errors import CaptureError, UnrepeatableError
from mlsys_nimble.ir import trees

_ADVICE = "Use torch's random operators, pass what changes as an argument of forward, or prepare with fallback='eager'."


def capture_checked(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Capture a model whose program is the same each time.

    A model that keeps something from its first call, such as a table of positions, is watched once more.

    Raises:
        CaptureError: see :func:`~mlsys_nimble.capture.capture`; or the program is another each time.
    """
    other_args, other_kwargs = varied((tuple(args), dict(kwargs)))
    before = _random_states()
    first = capture(model, args, kwargs, separates=False)
    drawn = before != (between := _random_states())
    try:
        second = capture(model, other_args, other_kwargs, separates=False)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001 - values that the model cannot take
        other_args, other_kwargs = args, kwargs
        second = capture(model, args, kwargs, separates=False)
    if drawn and between != _random_states():
        raise UnrepeatableError(f"forward draws random numbers from NumPy or Python. {_ADVICE}")
    if difference(first, second) is None:
        return first
    third = capture(model, args, kwargs, separates=False)
    differing = difference(second, third)
    if differing is None:
        return third
    raise UnrepeatableError(f"forward does not do the same each time: {differing}. {_ADVICE}")


def refuse_unrepeatable(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a model that does not do the same each time, and nothing else that a watched run refuses.

    Raises:
        UnrepeatableError: it does not.
    """
    try:
        capture_checked(model, args, kwargs)
    except UnrepeatableError:
        raise
    except Exception:  # noqa: BLE001 - whoever runs the model next meets it, if it matters
        return


def _random_states() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


def varied(tree: Any) -> Any:
    """Return a copy of arguments in which tensors hold other values of the same range.

    Example:
        >>> varied((torch.tensor([1, 2, 3]), "text"))
        (tensor([3, 1, 2]), 'text')
    """
    flat = trees.flatten(tree)
    return trees.unflatten([_other(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves], flat.spec)


def _other(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor  # the capture refuses it
    with torch.no_grad():
        made = torch.empty_like(tensor)
        rolled = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        if tensor.is_floating_point():
            rolled = rolled * 0.75
            if tensor.numel() and bool((tensor == 0).all()):
                rolled = torch.linspace(0.25, 0.75, tensor.numel(), device=tensor.device).reshape(tensor.shape)
        return made.copy_(rolled)


def difference(one: Captured, other: Captured) -> str | None:
    """Say what differs first between two captures of a model; None: nothing does."""
    a, b = one.program, other.program
    for first, second in zip(a.operators, b.operators, strict=False):
        if str(first) != str(second):
            return f"once {first.kind}, then {second.kind} ({first.source or first.name})"
    if len(a.operators) != len(b.operators):
        return f"once {len(a.operators)} operators, then {len(b.operators)}"
    if a.constants.keys() != b.constants.keys():
        return f"once {len(a.constants)} constants, then {len(b.constants)}"
    for value, tensor in a.constants.items():
        if not _same(tensor, b.constants[value]):
            reader = next((operator for operator in a.operators if value in operator.inputs), None)
            return f"a constant changes ({reader.source or reader.name})" if reader else "a constant changes"
    if (a.values, a.inputs, a.outputs, a.mutations) != (b.values, b.inputs, b.outputs, b.mutations):
        return "its results or what it writes to change"
    if repr(one.results.leaves) != repr(other.results.leaves) or one.results.spec != other.results.spec:
        return "what it returns beside tensors changes"
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.numel()):
        return True
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
