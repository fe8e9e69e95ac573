"""Repeated captures of a model on different values: where they differ, torch did not compute it from the inputs.

So random numbers of NumPy and Python, clocks, counters, and values that left torch and came back as constants are
refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.builder import dtype_name
from mlsys_nimble.capture.draws import other_states, refuse_reseeding
from mlsys_nimble.capture.layouts import copied
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import CaptureError, UnrepeatableError, refuse
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.program import ITEMSIZE
from mlsys_nimble.modes import without_modes

_ADVICE = "Use torch's random operators, pass what changes as an argument of forward, or prepare with fallback='eager'."


def capture_checked(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], questions: Questions | None = None
) -> Captured:
    """Capture a model, and verify that its program is the same at each call.

    A model that keeps something from its first call, such as a table of positions, is captured a third time.
    ``questions`` gets what the captured run asks about sizes.

    Raises:
        CaptureError: see :func:`~mlsys_nimble.capture.capture`; or the program differs between calls.
    """
    other_args, other_kwargs = varied((tuple(args), dict(kwargs)))
    again = None if questions is None else Questions()
    before = _random_states()
    first = capture(model, args, kwargs, separates=False, questions=questions)
    if first.device.type == "meta":
        advice = "Load the weights first: model.to_empty(device='cpu'), then load_state_dict."
        raise refuse("the model and its inputs lie on meta, which holds no values", "", advice)
    drawn = before != (between := _random_states())
    held = _numbers_held(model)
    with other_states(first.draws.generators, first.device) as given:
        try:
            second = capture(model, other_args, other_kwargs, separates=False, questions=again)
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001 - the model cannot take such values
            held = _numbers_held(model)
            second = capture(model, args, kwargs, separates=False, questions=again)
    if drawn and between != _random_states():
        raise UnrepeatableError(f"forward draws random numbers from NumPy or Python. {_ADVICE}")
    refuse_reseeding(first.draws, second.draws, given)
    found = first
    if difference(first, second) is not None:
        if questions is not None:
            questions.clear()
        held = _numbers_held(model)
        found = capture(model, args, kwargs, separates=False, questions=questions)
        if (differing := difference(second, found)) is not None:
            raise UnrepeatableError(f"forward does not do the same each time: {differing}. {_ADVICE}")
    _refuse_counting(model, held)
    return found


def _numbers_held(model: Any) -> dict[tuple[str, str], Any]:
    """Map (module path, attribute) to the number or string that the module holds."""
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {
        (path, name): value
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | complex | str)
    }


def _refuse_counting(model: Any, before: Mapping[tuple[str, str], Any]) -> None:
    """Refuse a model that changed a number or string of its own in its last run, when it had run before.

    Raises:
        UnrepeatableError: a replay would leave it as it is.
    """
    for key, value in _numbers_held(model).items():
        if (key in before and value == before[key]) or value != value:
            continue
        what = f"forward changes the attribute {'.'.join(filter(None, key))} at each call, and a replay would not"
        raise UnrepeatableError(f"{what}. Count in a buffer (self.count.add_(1)), or prepare with fallback='eager'.")


def refuse_unrepeatable(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a model that differs between calls, and let other refusals of capture pass.

    Raises:
        UnrepeatableError: the program differs between calls.
    """
    try:
        capture_checked(model, args, kwargs)
    except UnrepeatableError:
        raise
    except Exception:  # noqa: BLE001 - the next run of the model raises it again, if it matters
        return


def _random_states() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


@without_modes()
def varied(tree: Any) -> Any:
    """Return a copy of arguments in which tensors hold other values of the same range.

    Example:
        >>> varied((torch.tensor([1, 2, 3]), "text"))
        (tensor([3, 1, 2]), 'text')
    """
    flat = trees.flatten(tree)
    return trees.unflatten([_other(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves], flat.spec)


def _other(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or dtype_name(tensor.dtype) not in ITEMSIZE:
        return tensor  # capture refuses it
    with torch.no_grad():
        rolled = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        if tensor.is_floating_point():
            rolled = rolled * 0.75
            if tensor.numel() and bool((tensor == 0).all()):
                rolled = torch.linspace(0.25, 0.75, tensor.numel(), device=tensor.device).reshape(tensor.shape)
        return copied(tensor, rolled)


def difference(one: Captured, other: Captured) -> str | None:
    """Describe the first difference between two captures of a model; None if they agree."""
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


@without_modes()
def _same(one: Tensor, other: Tensor) -> bool:
    if one is other or (one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.numel()):
        return True
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())
