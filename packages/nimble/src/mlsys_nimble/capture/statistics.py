"""Writes that operators' schemas do not declare: running statistics, as writes that a program can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mlsys_nimble.errors import call_external, refuse
from mlsys_nimble.state.digest import Digest


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> list[Tensor]:
    """Return the normalised images and the saved statistics; write the new running statistics by ``copy_``."""
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    y, saved_mean, saved_rstd, new_mean, new_var = functional(x, weight, bias, mean, var, True, momentum, eps)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return [y, saved_mean, saved_rstd]


def declared(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], source: str) -> Callable[..., Any] | None:
    """Return a function equal to ``func`` for these arguments, with each write an operator of its own.

    None: the schema of ``func`` declares all that it writes.

    Raises:
        CaptureError: the statistics are expanded, so that many numbers would be written to one address.
    """
    name = func._schema.name
    if name not in ("aten::batch_norm", "aten::native_batch_norm", "aten::instance_norm") or kwargs:
        return None
    mean, updates = args[3], args[5]
    if mean is None or not updates:
        return None
    if any(0 in statistic.stride() for statistic in args[3:5]):
        what = f"{func} writes running statistics whose elements share memory"
        raise refuse(what, source, "Give it statistics of their own: expand(...).clone().")
    if name == "aten::instance_norm":  # torch decomposes it into a batch norm and a write
        return func.decompose  # type: ignore[no-any-return]
    is_one = name == "aten::batch_norm"

    def run(*args: Any) -> Any:
        results = _batch_norm(*args[:5], *args[6:8])
        return results[0] if is_one else results

    return run


def checked(func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Iterable[Tensor], source: str) -> Any:
    """Run an operator whose schema declares no write, and verify that it does not write.

    Raises:
        CaptureError: it has changed one of ``tensors``; operators outside torch have their writes undone.
    """
    known = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.layout is torch.strided]
    saved = [] if func.namespace in ("aten", "prims") else [tensor.clone() for tensor in known]
    digest = Digest(known)
    before = digest.read()
    result = call_external(func, *args, **kwargs)
    if digest.read() == before:
        return result
    for tensor, old in zip(known, saved, strict=False):
        tensor.copy_(old)
    what = f"{func} writes to its arguments, which its schema does not say"
    raise refuse(what, source, "Declare it: Tensor(a!) in the schema, or mutates_args=... of torch.library.custom_op.")
