"""Running a pipeline's operators on the host, by their sources' own code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.checks.table import is_frame, is_sparse
from mlsys_windtunnel.host.raw_table import Table, is_polars, raw, stored_cells
from mlsys_windtunnel.parse.graph import Kind, Operator
from mlsys_windtunnel.parse.questions import labels_of


def run(operator: Operator, inputs: list[Table]) -> Table:
    """Return an operator's output for its inputs.

    Raises:
        InvalidInputError: the source's own code refuses them.
    """
    if operator.kind is Kind.SELECT:
        return _selected(operator, _array(inputs[0]) if operator.drops_names else inputs[0])
    if operator.kind is Kind.CONCATENATE:
        if operator.output.is_sparse is not False and any(map(is_sparse, inputs)):
            from scipy.sparse import hstack  # type: ignore[import-untyped]

            return hstack(inputs, format="csr")
        return side_by_side(inputs)
    if operator.kind is Kind.UNSTORED:
        (table,) = inputs
        return stored_cells(table) if is_sparse(table) else table
    if operator.kind is Kind.SCALE:
        return inputs[0] * operator.weight
    if operator.kind is Kind.COMBINE:
        return _combined(operator, inputs)
    table = side_by_side(inputs)
    if operator.methods:
        return np.concatenate(
            [_source(operator, partial(_answer, operator.estimator, method), table) for method in operator.methods],
            axis=1,
        )
    return _source(operator, operator.estimator.transform, table)  # type: ignore[attr-defined]


def _selected(operator: Operator, table: Table) -> Table:
    """Return some columns of a table: by name where its source looks them up so."""
    is_by_name = operator.labels is not None and is_frame(table)
    columns: list[Any] = list((operator.labels if is_by_name else operator.columns) or ())
    wanted = columns[0] if operator.is_flat else columns
    try:
        if is_by_name:
            return table[wanted]
        return table.iloc[:, wanted] if hasattr(table, "iloc") else table[:, wanted]
    except (IndexError, KeyError) as error:
        raise InvalidInputError(f"{operator.name}: columns are missing: {error}") from error


def _source(operator: Operator, function: Callable[[Table], Any], table: Table) -> Any:
    """Run a source's own code on a table; its refusal becomes one line."""
    try:
        return function(table)
    except InvalidInputError:
        raise
    except Exception as error:  # third-party code
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInputError(f"{operator.name} refuses its input: {reason}") from error


def _answer(estimator: Any, method: str, table: Table) -> npt.NDArray[np.float64]:
    """Return one answer of a predictor in the graph, ``[rows, width]``; see :data:`~.parse.graph.METHODS`."""
    answer = raw(getattr(estimator, "predict" if method == "labels" else method)(table))
    classes = labels_of(estimator)
    if method == "predict" and classes is not None:
        answer = np.searchsorted(classes, answer)
    answer = answer.astype(np.float64)
    return answer.reshape(-1, 1) if answer.ndim == 1 else answer


def _combined(operator: Operator, inputs: list[Table]) -> npt.NDArray[np.float64]:
    """Join members' answers by the meta-estimator's module, in float64, for a fallback operator that reads them."""
    import torch

    module: Any = operator.estimator
    with torch.inference_mode():
        scores = module.double()(*(torch.from_numpy(np.ascontiguousarray(table, np.float64)) for table in inputs))
        joined: npt.NDArray[np.float64] = module.side_by_side(scores, operator.methods, dtype=torch.float64).numpy()
    return joined


def side_by_side(tables: list[Table]) -> Table:
    """Return tables as one; of several, an array, of objects where one holds objects."""
    if len(tables) == 1:
        return tables[0]
    arrays = [raw(table) for table in tables]
    arrays = [array.reshape(-1, 1) if array.ndim == 1 else array for array in arrays]
    return np.concatenate(
        [array.astype(object) for array in arrays] if any(a.dtype == object for a in arrays) else arrays, axis=1
    )


def _array(table: Table) -> Table:
    """Return the table without names; a sparse one stays sparse."""
    return table.to_numpy() if hasattr(table, "iloc") or is_polars(table) else table
