"""Capture as a preparation asks for it, and whose fault an unexpected error is: the model's, or Nimble's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mlsys_core.errors import MlsysError

from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.capture.repeat import capture_checked
from mlsys_nimble.capture.watched import Questions
from mlsys_nimble.errors import refuse_or_blame
from mlsys_nimble.ir import trees
from mlsys_nimble.ir.sizes import NotGeneral
from mlsys_nimble.modes import without_modes
from mlsys_nimble.state.held import Held


def capture_or_refuse(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fixed_indices: Collection[int],
    questions: Questions | None = None,
) -> Captured:
    """Capture a model as a preparation does: twice, unless it is a graph of torch.compile's.

    Raises:
        CaptureError: no schedule can hold the model, or a fault of Nimble's own; what the model itself raises is
            raised as it is.
    """
    held = Held(model) if isinstance(model, torch.nn.Module) else None
    try:
        if isinstance(model, torch.fx.GraphModule):
            return capture(model, args, kwargs, fixed_indices=fixed_indices, separates=False, questions=questions)
        return capture_checked(model, args, kwargs, questions)
    except Exception as error:  # the model's own, or one of the capture
        if held is not None:
            held.put_back()
        if isinstance(error, MlsysError):
            raise
        with torch.no_grad():
            run_on_copies(model, args, kwargs)
        what, advice = "the model runs, but not when it is watched", "Prepare with fallback='eager'."
        modules = model.modules() if isinstance(model, torch.nn.Module) else (model,)
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            what, advice = "a TorchScript module, which cannot be watched", f"Give what it was made of. {advice}"
        raise refuse_or_blame(error, what, advice) from error


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Put all modules in eval mode within the context."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def faults_refused() -> Iterator[None]:
    """Refuse a model on which passes or executors fail, so that ``fallback="eager"`` and torch.compile can go on."""
    try:
        with without_modes():
            yield
    except (MlsysError, NotGeneral):
        raise
    except Exception as error:
        what = "no schedule can be made"
        raise refuse_or_blame(error, what, "Prepare with fallback='eager'.") from error


def run_on_copies(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a model eagerly on copies of the tensors."""
    flat = trees.flatten((args, dict(kwargs)))
    leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    copied_args, copied_kwargs = trees.unflatten(leaves, flat.spec)
    return model(*copied_args, **copied_kwargs)
