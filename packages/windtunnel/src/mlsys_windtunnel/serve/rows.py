"""``POST /predict``: rows of JSON with named columns, answered by the models of the Open Inference Protocol's front."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import Router
from mlsys_serving.models import ModelRepository
from starlette.requests import Request

from mlsys_windtunnel.export.onnx_rows import ARRAY
from mlsys_windtunnel.serve.model import Columns, ServedPipeline

_LARGEST = sys.float_info.max
_FIELDS = {"model", "rows", "columns"}


def rows_router(repository: ModelRepository) -> Router:
    """Return the route.

    The body holds ``rows``, a list of objects by column, or ``columns``, an object of lists; ``model`` where there are
    several. ``null`` is a missing cell. A pipeline that was fitted on an array takes ``rows`` as lists of numbers.
    """
    router, numbers = Router(), itertools.count(1)

    @router.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        """Answer rows with named columns."""
        body = await request.json()
        version = repository.find(_model_name(body, repository))
        model = version.model
        assert isinstance(model, ServedPipeline)
        columns, num_rows = read_rows(body, model)
        if num_rows > model.spec.max_batch_size:
            raise InvalidInputError(
                f"the request has {num_rows:,} rows; at most {model.spec.max_batch_size:,} are taken"
            )
        start = model.clock.now()
        version.hold()
        try:
            answers = await model.answer(f"rows-{next(numbers)}", columns)
        finally:
            version.release()
        took = model.clock.now() - start
        version.statistics.succeed(num_rows, took, None, now_ms=time.time_ns() // 1_000_000)
        found: dict[str, Any] = {"model": model.spec.name, **{name: each.tolist() for name, each in answers.items()}}
        return found | ({"classes": model.classes} if model.classes else {})

    return router


def _model_name(body: Any, repository: ModelRepository) -> str:
    if not isinstance(body, dict) or not {"rows", "columns"} & body.keys():
        raise InvalidInputError('the body is an object with "rows" (a list of objects) or "columns" (lists by name)')
    if unknown := sorted(body.keys() - _FIELDS):
        raise InvalidInputError(f"the body has the unknown fields {unknown}; it takes {sorted(_FIELDS)}")
    names = sorted({version.spec.name for version in repository.versions()})
    name = body.get("model")
    if name is None and len(names) == 1:
        return names[0]
    if not isinstance(name, str):
        raise InvalidInputError(f'name the model, as "model": one of {names}')
    return name


def read_rows(body: dict[str, Any], model: ServedPipeline) -> tuple[Columns, int]:
    """Return the columns that a pipeline reads of a request's body, and the number of rows.

    Raises:
        InvalidInputError: A column is missing, or holds what is no cell of its type.
    """
    plan = model.plan
    names = [column.name for column in plan.columns]
    if ("rows" in body) == ("columns" in body):
        raise InvalidInputError('give "rows" or "columns", one of them')
    rows = body.get("rows")
    if not plan.is_named and "rows" in body and isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        table = _numbers(rows, plan.width)
        if [each.name for each in model.spec.inputs] == [ARRAY]:
            return {ARRAY: table.astype(np.float64)}, len(table)
        return {name: table[:, index] for name, index in zip(names, plan.indices, strict=True)}, len(table)
    if "rows" in body:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InvalidInputError('"rows" is a list of objects, each with a value by column')
        missing = sorted({name for row in rows for name in names if name not in row})
        columns = {name: [row.get(name) for row in rows] for name in names}
    else:
        given = body["columns"]
        if not isinstance(given, dict) or not all(isinstance(cells, list) for cells in given.values()):
            raise InvalidInputError('"columns" is an object of lists, one by column')
        missing = [name for name in names if name not in given]
        columns = {name: given.get(name, []) for name in names}
    if missing:
        raise InvalidInputError(f"the input lacks the columns {missing}; the pipeline reads {names}")
    sizes = {len(cells) for cells in columns.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise InvalidInputError("give each column a cell for each row, and at least one row")
    made = {column.name: _column(column.name, column.type, columns[column.name]) for column in plan.columns}
    if [each.name for each in model.spec.inputs] == [ARRAY]:
        whole = np.zeros((sizes.pop(), plan.width))
        for name, index in zip(names, plan.indices, strict=True):
            whole[:, index] = made[name]
        return {ARRAY: whole}, len(whole)
    return made, sizes.pop()


def _numbers(rows: list[list[Any]], width: int) -> Any:
    if not rows or any(len(row) != width for row in rows):
        raise InvalidInputError(f"each row is a list of {width} cells, and at least one row is needed")
    cells = [[np.nan if cell is None else cell for cell in row] for row in rows]
    if any(isinstance(cell, dict | list) for row in cells for cell in row):
        raise InvalidInputError("a cell is a number, a text, a truth value or null")
    if any(isinstance(cell, int) and abs(cell) > _LARGEST for row in cells for cell in row):
        raise InvalidInputError("a cell holds an integer beyond float64: give a lesser one")
    return np.array(cells, object)


def _column(name: str, kind: str, cells: list[Any]) -> Any:
    """Return the cells of a column as the pipeline reads them."""
    if kind == "string":
        if not all(cell is None or isinstance(cell, str) for cell in cells):
            raise InvalidInputError(f"column {name} is text: give strings, or null for a missing cell")
        return np.array([np.nan if cell is None else cell for cell in cells], object)
    if kind == "bool":
        if not all(isinstance(cell, bool) for cell in cells):
            raise InvalidInputError(f"column {name} holds truth values: give true or false")
        return np.array(cells, np.bool_)
    if not all(cell is None or isinstance(cell, int | float) for cell in cells):
        raise InvalidInputError(f"column {name} holds numbers: give numbers, or null for a missing cell")
    dtype = np.int64 if kind == "int64" and all(type(cell) is int for cell in cells) else np.float64
    try:
        return np.array([np.nan if cell is None else cell for cell in cells], dtype)
    except OverflowError as error:
        raise InvalidInputError(f"column {name} holds an integer beyond {dtype.__name__}: give a lesser one") from error
