"""Example inputs for a program, made from its graph's description of them: the file's own are a pickle."""

from __future__ import annotations

from typing import Any

from mlsys_core.errors import InvalidInputError

_MAX_NBYTES = 1 << 30
_SEED = 0


def examples(module: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Return positional and keyword inputs.

    Args:
        module: ``torch._export.serde.schema.GraphModule``, rebuilt.

    Returns:
        None for the positional ones if a size has no example.

    Raises:
        InvalidInputError: they would take more than 1 GiB.
    """
    import torch
    from torch.utils import _pytree as pytree

    generator = torch.Generator().manual_seed(_SEED)
    leaves = []
    for spec in module.signature.input_specs:
        if spec.type == "constant_input":
            leaves.append(None if spec.value.value.type == "as_none" else spec.value.value.value)
        elif spec.type == "user_input":
            try:
                leaves.append(_leaf(module.graph, spec.value.arg, generator))
            except _NoExampleError:
                return None, {}
    structure = pytree.treespec_loads(module.module_call_graph[0].signature.in_spec)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return tuple(args), dict(kwargs)


class _NoExampleError(Exception):
    """A size that is not known."""


def _leaf(graph: Any, argument: Any, generator: Any) -> Any:
    if argument.type == "as_tensor":
        return _tensor(graph.tensor_values[argument.as_tensor.name], generator)
    if argument.type == "as_sym_int":
        return _number(graph.sym_int_values[argument.as_sym_int.as_name])
    if argument.type == "as_none":
        return None
    if argument.type in ("as_int", "as_float", "as_bool", "as_string"):
        return argument.value
    raise _NoExampleError


def _tensor(meta: Any, generator: Any) -> Any:
    import torch
    from torch._export.serde.serialize import deserialize_device, deserialize_scalar_type

    sizes = [_number(size) for size in meta.sizes]
    dtype = deserialize_scalar_type(meta.dtype)
    nbytes = torch.empty((), dtype=dtype).element_size()
    for size in sizes:
        nbytes *= size
    if min(sizes, default=0) < 0 or nbytes > _MAX_NBYTES:
        raise InvalidInputError(f"an input of shape {sizes} is too large for an example")
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        tensor = torch.randn(sizes, dtype=wide, generator=generator).to(dtype)
    else:
        tensor = torch.full(sizes, dtype == torch.bool, dtype=dtype)
    return tensor.to(deserialize_device(meta.device)).requires_grad_(meta.requires_grad)


def _number(size: Any) -> int:
    if size.type == "as_int":
        return int(size.as_int)
    hint = size.as_expr.hint
    if hint is None or hint.type != "as_int":
        raise _NoExampleError
    return int(hint.as_int)
