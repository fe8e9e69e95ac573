"""Torch's ambient modes: each case is prepared in one and called in another, and leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad


@contextmanager
def _default(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "gradients": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default float64": lambda: _default(torch.float64),
    "default bfloat16": lambda: _default(torch.bfloat16),
    "default float16": lambda: _default(torch.float16),
    "default device": lambda: torch.device("meta"),
    "dual level": forward_ad.dual_level,
}


def within(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in a mode."""

    def run(*args: Any) -> Any:
        with MODES[mode]():
            return function(*args)

    return run if mode else function


def present() -> tuple[Any, ...]:
    """Return what every mode is now."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        forward_ad._current_level,
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
    )
