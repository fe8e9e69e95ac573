"""Write prepared calls to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError

from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.backends.cpu.library import load
from mlsys_nimble.backends.cpu.ranged import RangedExecutor
from mlsys_nimble.capture.results import Results
from mlsys_nimble.ir import trees
from mlsys_nimble.prepared import Prepared
from mlsys_nimble.saved.container import TensorTable, write_file
from mlsys_nimble.saved.records import program_record, tree_record


class _Marker:
    """Leaf that stands for a tensor."""

    def __init__(self, number: int) -> None:
        self.number = number


def save(prepared: Sequence[Prepared], path: str | Path) -> int:
    """Write prepared calls to a file that :func:`~mlsys_nimble.saved.loading.load` maps; return its size in bytes.

    Raises:
        InvalidInputError: a schedule has no form in a file; the message says what of it.
    """
    table = TensorTable()
    schedules = [_schedule(each, table) for each in prepared]
    lanes = int(load().kernel_lanes())
    return write_file(Path(path), {"lanes": lanes, "schedules": schedules}, table)


def _schedule(prepared: Prepared, table: TensorTable) -> dict[str, Any]:
    executor = prepared.executor
    if isinstance(executor, RangedExecutor):
        raise _unsavable("one preparation for many sizes", "prepare it without dynamic, for each size")
    if not isinstance(executor, NativeExecutor):
        raise _unsavable(f"a schedule of {type(executor).__name__}", "prepare it with executor='native'")
    if prepared.has_changed(looks_at_all=True):
        raise _unsavable("a schedule of a model that has changed since", "call it once, which prepares it again")
    if prepared.strides == "exact":
        raise _unsavable("a forward that asks for strides", "have it compute the same for all strides")
    program, decided = executor.source, executor.decisions
    if set(program.inputs) & {old for old, _ in program.mutations}:
        raise _unsavable("a forward that writes to its arguments", "return the new value")
    constants = executor.constants()
    record = program_record(program)
    return {
        **record,
        "call": _call(prepared),
        **_result(prepared.captured.results),
        "constants": [
            [value, None if tensor.device.type == "meta" else table.add(tensor)] for value, tensor in constants.items()
        ],
        "num_threads": decided.num_threads,
        "use_multi_stream": executor.use_multi_stream,
        "kernels": dict(decided.kernels),
        "seconds": dict(decided.seconds),
        "assignments": list(decided.assignments),
        "packed": {name: [table.add(tensor) for tensor in tensors] for name, tensors in decided.packed.items()},
    }


def _call(prepared: Prepared) -> Any:
    if prepared.call is None:
        raise _unsavable("a call that was prepared under autocast", "prepare it outside, or call model.half() before")
    leaves = list(prepared.call.leaves)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return _tree(leaves, indices, prepared.call.spec, "an argument")


def _result(results: Results) -> dict[str, Any]:
    for origin in results.origins:
        if origin.kind == "constant" or origin.steps:
            raise _unsavable("a result that is a view of an argument, a weight or another result", "return y.clone()")
    if results.changed:
        raise _unsavable("a forward that changes objects among its arguments", "return the new values")
    leaves = list(results.leaves)
    for index in results.tensor_indices:
        leaves[index] = None
    record = _tree(leaves, results.tensor_indices, results.spec, "a result")
    return {"result": record, "origins": [[origin.kind, origin.number] for origin in results.origins]}


def _tree(leaves: list[Any], indices: Sequence[int], spec: trees.Spec, what: str) -> Any:
    for number, index in enumerate(indices):
        leaves[index] = _Marker(number)
    try:
        return tree_record(
            trees.unflatten(leaves, spec), lambda leaf: getattr(leaf, "number", None) if type(leaf) is _Marker else None
        )
    except TypeError as error:
        raise _unsavable(
            f"{what} of class {error}", "pass and return tensors, in tuples, lists and dictionaries"
        ) from error


def _unsavable(what: str, advice: str) -> InvalidInputError:
    return InvalidInputError(f"{what} cannot be saved: {advice}")
