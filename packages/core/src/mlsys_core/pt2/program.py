"""Load an exported program from any source, in one way for all commands."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.archive import Archive

if TYPE_CHECKING:
    from torch.export import ExportedProgram


_MAX_NBYTES = 1 << 30  # of all example inputs
_SEED = 0


def _examples(module: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Make positional and keyword inputs from the graph's description of them: the file's own are a pickle.

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


_MODEL = "models/model.json"
_WEIGHTS = "data/weights"
_CONSTANTS = "data/constants"
_EXTRA = "extra/"
_HINT = "if you trust its maker, --trust-code (trust_code=True) has torch.export.load read it, which runs what it holds"


@dataclass(frozen=True)
class SavedProgram:
    """Content of a ``.pt2`` file.

    Attributes:
        program: The graph with its weights.
        example_args: Inputs by position that fit the graph. Made from the shapes it was exported with (numbers from a
            normal distribution with seed 0, zeros for integers, True for truth values), since the file's own are a
            pickle; the file's own where code is trusted. None: a size has no example.
        example_kwargs: Inputs by keyword, likewise.
        extra: Texts saved with it, by name.
    """

    program: ExportedProgram
    example_args: tuple[Any, ...] | None
    example_kwargs: dict[str, Any]
    extra: dict[str, str]


def load_program(path: Path | str, *, trust_code: bool = False) -> SavedProgram:
    """Load a program that ``torch.export.save`` of torch 2.11 or later wrote; run and unpickle nothing in it.

    Args:
        path: The file.
        trust_code: Let ``torch.export.load`` read it: also older files, and those with custom operators, objects or
            tensor subclasses. A file can then run any code.

    Raises:
        InvalidInputError: no such file, damaged, or with content that cannot be read safely.

    Example:
        >>> load_program("no.pt2")
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: there is no file no.pt2; write one with torch.export.save(program, path)
    """
    path = Path(path)
    if trust_code:
        return _trusted(path)
    try:
        with Archive(path) as archive:
            return _read(archive)
    except InvalidInputError as error:
        if path.is_file():
            raise InvalidInputError(f"{error}; {_HINT}") from error
        raise


def _read(archive: Archive) -> SavedProgram:
    from torch._export.serde import schema
    from torch._export.serde.serialize import ExportedProgramDeserializer

    from mlsys_core.pt2.schema import rebuild

    models = [name for name in archive.names if name.startswith("models/")]
    if models != [_MODEL]:
        raise archive.damaged(f"it holds {len(models)} models; one is needed, {_MODEL}")
    try:
        described = rebuild(schema.ExportedProgram, archive.read_json(_MODEL))
        weights, constants = (_payloads(archive, folder) for folder in (_WEIGHTS, _CONSTANTS))
        _require_match(described.graph_module, weights, constants)
        tensors = _tensors(archive, weights, constants)
        with _quietly():
            args, kwargs = _examples(described.graph_module)
            inputs = None if args is None else (args, kwargs)  # without them torch wants dicts in the file's order
            program = ExportedProgramDeserializer().deserialize(described, *tensors, inputs)
    except InvalidInputError as error:
        text = str(error)
        raise (error if text.startswith(str(archive.path)) else archive.damaged(text)) from error
    except Exception as error:  # torch asserts, and raises of many kinds
        raise archive.damaged(f"torch cannot rebuild it ({first_line(error)})") from error
    extra = {name.removeprefix(_EXTRA): archive.read_text(name) for name in archive.names if name.startswith(_EXTRA)}
    return SavedProgram(program, args, kwargs, extra)


def _payloads(archive: Archive, folder: str) -> dict[str, Any]:
    """Return the descriptions of a folder's tensors by name."""
    from torch._export.serde import schema

    from mlsys_core.pt2.schema import rebuild

    if f"{folder}/model.pt" in archive.names:
        raise archive.damaged("torch before 2.9 wrote it, which kept tensors as a pickle; save it again")
    name = f"{folder}/model_{folder.rpartition('/')[2]}_config.json"
    config: dict[str, Any] = rebuild(schema.PayloadConfig, archive.read_json(name)).config
    return config


def _tensors(
    archive: Archive, weights: dict[str, Any], constants: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    from mlsys_core.pt2.archive import read_tensors

    return read_tensors(archive, _WEIGHTS, weights), read_tensors(archive, _CONSTANTS, constants)


def _require_match(module: Any, weights: dict[str, Any], constants: dict[str, Any]) -> None:
    """Refuse weights of another type or shape than the graph was made for: their results would be undefined."""
    names = {
        "parameter": lambda spec: spec.parameter_name,
        "buffer": lambda spec: spec.buffer_name,
        "tensor_constant": lambda spec: spec.tensor_constant_name,
    }
    for spec in module.signature.input_specs:
        if spec.type not in names:
            continue
        name = names[spec.type](spec.value)
        payload = weights.get(name) or constants.get(name)
        if payload is None or payload.tensor_meta is None:
            raise InvalidInputError(f"it lacks the {spec.type.replace('_', ' ')} {name}")
        expected, found = module.graph.tensor_values.get(spec.value.arg.name), payload.tensor_meta
        if expected is None or (expected.dtype, _sizes(expected)) != (found.dtype, _sizes(found)):
            raise InvalidInputError(f"{name} has another type or shape than the graph was made for")


def _sizes(meta: Any) -> list[tuple[str, Any]]:
    return [(size.type, size.value) for size in meta.sizes]


def _trusted(path: Path) -> SavedProgram:
    import torch

    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}; write one with torch.export.save(program, path)")
    extra: dict[str, Any] = {}
    try:
        with _quietly():
            program = torch.export.load(path, extra_files=extra)
    except Exception as error:  # of many kinds
        raise InvalidInputError(f"{path} is not what torch.export.save writes ({first_line(error)})") from error
    args, kwargs = program.example_inputs or (None, {})
    return SavedProgram(program, None if args is None else tuple(args), dict(kwargs), extra)


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type if empty: torch appends a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "Error:" in line), lines[0] if lines else "")
    return said[:200] or type(error).__name__


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from logging a traceback of an error that is raised anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._export")]

    def no_record(_record: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logger.addFilter(no_record)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(no_record)


def without_places(exported: ExportedProgram) -> ExportedProgram:
    """Return ``exported``, whose operations no longer say in which files and lines they were written."""
    for module in exported.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return exported
