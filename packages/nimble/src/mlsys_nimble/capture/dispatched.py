"""Facts about a dispatched operator, by its name, tags and arguments; and the operator that does not write.

Schemas do not declare writes of running statistics: :func:`declared` makes them operators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlsys_nimble.capture.aliases import shares_elements
from mlsys_nimble.capture.builder import Ref
from mlsys_nimble.errors import call_external, refuse
from mlsys_nimble.ir.operators import Aten, Input
from mlsys_nimble.state.digest import Digest

_WHOLE = frozenset(
    {
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        # These raise for invalid values, and a replay must raise too.
        *("linalg_cholesky", "linalg_inv", "linalg_solve", "linalg_lu_factor", "linalg_ldl_factor", "one_hot"),
    }
)
STATIC_CHECKS = ("aten._assert_tensor_metadata", "aten.sym_constrain_range", "aten._assert_scalar")
_ANY_STRIDES = (
    "conv",
    "upsample",
    "max_pool",
    "avg_pool",
    "adaptive_",
    "native_batch_norm",
    "batch_norm",
    "_native_batch",
)
_STRIDED = ("aten.as_strided.", "aten.as_strided_copy", "aten.as_strided_scatter")
VIEWS_IN_PLACE = {
    "detach_": "detach",
    "transpose_": "transpose",
    "t_": "t",
    "squeeze_": "squeeze",
    "unsqueeze_": "unsqueeze",
    "swapaxes_": "swapaxes",
    "swapdims_": "swapdims",
}


def is_whole(func: Any, args: Sequence[Any] = ()) -> bool:
    """Return whether a composite is recorded whole: torch runs it faster, or it checks values or rounds otherwise."""
    name = func._schema.name.removeprefix("aten::")
    return name in _WHOLE or (name.startswith("upsample") and not args[0].is_floating_point())


def as_aten(
    func: Any, refs: tuple[Sequence[Any], Mapping[str, Any]], tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[Aten, list[Ref]]:
    """Return an operator that torch runs in the program, and its inputs.

    Args:
        func: The operator that torch dispatched.
        refs: Its positional and keyword arguments, with refs for tensors.
        tensors: These tensors, in their order.
        device: Where the program runs.
    """
    name, inputs = str(func), list[Ref]()

    def encode(item: Any) -> Any:
        if isinstance(item, Ref):
            inputs.append(item)
            return Input(len(inputs) - 1)
        return tuple(map(encode, item)) if isinstance(item, list | tuple) else item

    arguments = tuple(map(encode, refs[0]))
    keywords = tuple((k, device if k == "device" and v else encode(v)) for k, v in refs[1].items())
    even = () if takes_any_strides(name) else [i for i, t in enumerate(tensors) if t.is_contiguous()]
    return Aten(name, arguments, keywords, tuple(even)), inputs


def takes_any_strides(name: str) -> bool:
    """Return whether torch runs an operator well on channels-last images, whatever strides eager had."""
    return name.removeprefix("aten.").startswith(_ANY_STRIDES)


def view_of(func: Any) -> Callable[..., torch.Tensor] | None:
    """Return the view that an operator such as ``transpose_`` makes of its argument; None if it makes none."""
    name = VIEWS_IN_PLACE.get(func._schema.name.removeprefix("aten::"), "")
    return getattr(torch.ops.aten, name, None)


def read_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Return the tensors whose values decide a number or a shape that an operator gives; None if none can."""
    if torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags:
        return None
    name = str(func)
    if _is_sized(name, args, kwargs):
        return None
    if name == "aten.index.Tensor":
        return [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return tensors_of(args)


def refuse_unplanned(name: str, args: Sequence[Any], source: str) -> None:
    """Refuse an operator that reads an object's weights, or memory by strides that the layout plans later."""
    if any(isinstance(argument, torch.ScriptObject) for argument in args):
        what = f"{name} reads weights that torch has packed into an object"
        advice = "Quantise by PT2E (torchao), whose weights are tensors, or prepare with fallback='eager'."
        raise refuse(what, source, advice)
    if name.startswith(_STRIDED) and not _is_row_by_row(args[0]):
        what = "as_strided of a tensor that is itself a view, or does not lie row by row"
        raise refuse(what, source, "Call contiguous().clone() before, or use slices and expand.")


def _is_row_by_row(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is row-major and has its memory to itself."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _is_sized(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an argument fixes the shape of a result; a replay raises for values that do not fit."""
    if name == "aten.one_hot.default":
        return len(args) > 1 and args[1] >= 0
    return name == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is not None


_SPECIAL = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}


@dataclass(frozen=True, slots=True)
class Written:
    """Call that writes, expressed by an operator that does not."""

    function: Any  # an overload without side effects
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[torch.Tensor, ...]  # receive the function's results, in this order


def as_functional(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written | None:
    """Return the call without its side effects, or None.

    None: torch has no such operator, or the call writes more than the operator's results.
    """
    function = _counterpart(func)
    if function is None:
        return None
    arguments = func._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [named.get(argument.name) for argument in arguments if is_write(argument)]
    targets = tuple(tensors_of(written))
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in function._schema.arguments:
        if not argument.kwarg_only:
            positional.append(named[argument.name])
        elif argument.name in named:
            keywords[argument.name] = named[argument.name]
    return Written(function, tuple(positional), keywords, targets)


@cache
def _counterpart(func: Any) -> Any:
    """Return the overload with the same arguments that writes none of them; None if there is none."""
    arguments = func._schema.arguments
    written = [argument for argument in arguments if is_write(argument)]
    is_out = all(argument.is_out for argument in written)
    if not is_out and written != arguments[:1]:
        return None
    namespace, _, name = func._schema.name.partition("::")
    if not is_out:
        name = _SPECIAL.get(name) or (name.removesuffix("_") if not name.endswith("__") else "")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    wanted = _signature(argument for argument in arguments if not argument.is_out)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if candidate is func or any(map(is_write, candidate._schema.arguments)):
            continue
        if _signature(candidate._schema.arguments) == wanted:
            return candidate
    return None


def _signature(arguments: Any) -> list[tuple[str, str]]:
    """Return names and types, sorted: ``polygamma_`` takes its tensor first, ``polygamma`` its number."""
    return sorted((argument.name, str(argument.type)) for argument in arguments)


def is_tensor(item: Any) -> bool:
    """Return whether an item of a pytree is a tensor."""
    return isinstance(item, torch.Tensor)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in tree_leaves(tree) if is_tensor(leaf)]


def is_write(argument: Any) -> bool:
    """Return whether an operator writes to an argument of its schema."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def has_overlaps(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Return whether one of the targets shares elements with another tensor, or appears twice."""
    return any(sum(shares_elements(target, other) for other in tensors) > 1 for target in targets)


_IN_ORDER = ("aten::copy_", "aten::cumsum", "aten::cumprod", "aten::_foreach_")  # each element is read, then written


def reads_what_it_writes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
) -> bool:
    """Return whether a call that writes may read elements that it has written: its result depends on their order."""
    named = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | dict(kwargs)
    read = tensors_of([named.get(argument.name) for argument in func._schema.arguments if not is_write(argument)])
    is_pointwise = torch.Tag.pointwise in func.tags or func._schema.name.startswith(_IN_ORDER)
    for target in targets:
        if any(shares_elements(target, each) and not (is_pointwise and _is_same(target, each)) for each in read):
            return True
    return has_overlaps(targets, targets)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        *(other.data_ptr(), other.shape, other.stride(), other.dtype),
    )


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
