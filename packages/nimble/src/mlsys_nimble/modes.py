"""Torch's ambient modes: what a thread has switched on, beside the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

_KINDS = ("cpu", "cuda")
_FUNCTORCH: Any = torch._C._functorch
_HOOKS: Any = torch._C._autograd


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore every ambient mode afterwards: what was opened within, by code that ended early, is closed.

    Gradients, autocast, the default dtype and device, levels of functorch and of dual numbers. Inference mode is an
    object's, which restores it when it dies: who runs the code closes the object.
    """
    depth, level = _FUNCTORCH.get_dynamic_layer_stack_depth(), forward_ad._current_level
    has_hooks, inplace = _HOOKS._saved_tensors_hooks_is_enabled(), _FUNCTORCH.get_inplace_requires_grad_allowed()
    has_gradients, forward = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    dtype = torch.get_default_dtype()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    num_functions = torch._C._len_torch_function_stack()  # the default device is one of them
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > num_functions:
            torch._C._pop_torch_function_stack()
        if _FUNCTORCH.get_dynamic_layer_stack_depth() > depth:
            _FUNCTORCH.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]
        if has_hooks:
            _HOOKS._saved_tensors_hooks_enable()
        _FUNCTORCH.set_inplace_requires_grad_allowed(inplace)
        torch._C._set_fwd_grad_enabled(forward)
        torch._C._set_grad_enabled(has_gradients)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        for kind, is_on, cast in casts:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, cast)


def unusual_modes() -> tuple[Any, ...] | None:
    """Return the modes by which a model may compute something else: autocast, default dtype and device; None: none."""
    num_functions = torch._C._len_torch_function_stack()
    if not num_functions and not torch._C._is_any_autocast_enabled() and torch.get_default_dtype() is torch.float32:
        return None
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS)
    functions = map(torch._C._get_function_stack_at, range(num_functions))
    return casts, torch.get_default_dtype(), *[getattr(mode, "device", None) for mode in functions]


@contextmanager
def without_modes() -> Iterator[None]:
    """Make and replay schedules without autocast, whose casts they hold, and with the devices that they name."""
    with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


class Casts:
    """Autocast of the parts that an operator is recorded as; torch switches autocast off in a dispatch mode's calls.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type if device.type in _KINDS else "cpu"  # autocast knows no meta device
        self._is_on = False  # at the latest call of the model's
        self._is_cast = False  # within an operator whose arguments autocast takes as a whole

    def note(self) -> None:
        """Note whether autocast is on, where the model calls torch."""
        self._is_on = torch.is_autocast_enabled(self._kind)

    @contextmanager
    def of_parts(self, func: Any) -> Iterator[None]:
        """Cast what the parts of ``func`` take, unless its own arguments are cast."""
        before, key = self._is_cast, f"Autocast{self._kind.upper()}"
        self._is_cast = before or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
        is_off = self._is_cast or not self._is_on
        try:
            with torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key), is_off):
                yield
        finally:
            self._is_cast = before
