"""Cascades: what fits together, what each model is asked, and whose answer a row gets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.cascades import declared, read_cascade
from mlsys_serving.certainty import RULES, certainty
from mlsys_serving.models import (
    DataType,
    InferRequest,
    InferResponse,
    ModelLoadError,
    ModelRepository,
    ModelSpec,
    TensorSpec,
)

ROWS = (-1, 2)


class Affine:
    """``factor`` times x, plus ``more``; notes its requests and how many run at a time."""

    def __init__(self, name: str, factor: float, *, waits_for: int = 0, taken: str = "x", given: str = "y") -> None:
        tensors = [TensorSpec(each, DataType.FP32, ROWS) for each in (taken, given)]
        self.spec = ModelSpec(name=name, inputs=(tensors[0],), outputs=(tensors[1],), max_batch_size=8)
        self.factor, self.waits_for = factor, waits_for
        self.requests: list[InferRequest] = []

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        (x,) = request.inputs.values()
        if (x < 0).all():
            raise InvalidInputError(f"{self.spec.name} takes no such rows")
        return InferResponse({self.spec.outputs[0].name: (x * self.factor).astype(np.float32)})

    async def close(self) -> None:
        """Free nothing."""


async def repository(models: list[Any], *values: Any) -> ModelRepository:
    made = ModelRepository(models)
    made.configure(composed=[declared(value) for value in values])
    await made.load_all()
    return made


async def ask(repository: ModelRepository, name: str, x: Any, **fields: Any) -> InferResponse:
    version = repository.find(name)
    array = np.asarray(x, np.float32)
    assert version.unary is not None
    return await version.unary.infer(
        InferRequest(
            key="1",
            model_name=name,
            model_version="1",
            inputs={version.spec.inputs[0].name: array},
            outputs=version.output_names,
            num_rows=len(array),
            **fields,
        )
    )


def cascade(at_least: float = 0.9, rule: str = "confidence") -> dict[str, Any]:
    small = {"model": "small", "output": "y", "rule": rule, "at_least": at_least}
    return {"name": "both", "cascade": [small, {"model": "large"}]}


async def test_rows_that_the_small_model_is_not_certain_of_go_on_alone() -> None:
    small, large = Affine("small", 1), Affine("large", 10)
    made = await repository([small, large], cascade())
    x = [[0, 9], [0, 1], [8, 0], [1, 1]]
    response = await ask(made, "both", x)
    assert response.outputs["level"].tolist() == [0, 1, 0, 1]
    assert response.outputs["y"].tolist() == [[0, 9], [0, 10], [8, 0], [10, 10]]
    assert large.requests[0].inputs["x"].tolist() == [[0, 1], [1, 1]]
    assert (await ask(made, "both", [[0, 9]])).outputs["level"].tolist() == [0]
    assert len(large.requests) == 1
    assert made.find("large").statistics.num_rows == 2


@given(x=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), rule=st.sampled_from(RULES))
def test_each_row_gets_what_it_gets_alone(x: list[tuple[int, int]], rule: str) -> None:
    async def run() -> None:
        made = await repository([Affine("small", 1), Affine("large", 10)], cascade(0.8, rule))
        together = await ask(made, "both", x)
        for number, row in enumerate(x):
            alone = await ask(made, "both", [row])
            for name, array in alone.outputs.items():
                assert array[0].tolist() == together.outputs[name][number].tolist()

    asyncio.run(run())


@given(scores=st.lists(st.lists(st.floats(-50, 50), min_size=3, max_size=3), min_size=1, max_size=5))
def test_certainties_lie_between_0_and_1_and_do_not_depend_on_the_other_rows(scores: list[list[float]]) -> None:
    array = np.array(scores)
    for rule in RULES:
        found = certainty(array, rule)
        assert ((found >= -1e-9) & (found <= 1 + 1e-9)).all()
        assert found.tolist() == [certainty(row[None], rule)[0] for row in array]
        assert certainty(array[:, ::-1], rule) == pytest.approx(found)


LEVEL = {"model": "start", "output": "y", "at_least": 0.9}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "e", "cascade": [LEVEL, {"model": "none"}]}, "there is no model 'none'"),
        ({"name": "start", "cascade": [LEVEL, {"model": "wide"}]}, "a model 'start' already"),
        ({"name": "e", "cascade": [LEVEL, {"model": "wide"}]}, "other inputs or outputs"),
        ({"name": "e", "cascade": [LEVEL | {"output": "z"}, {"model": "start"}]}, "no output 'z'"),
    ],
)
async def test_what_does_not_fit_together_is_refused_at_load(value: Any, message: str) -> None:
    wide = Affine("wide", 1)
    row = (TensorSpec("x", DataType.FP32, (-1, 3)),)
    wide.spec = ModelSpec(name="wide", inputs=row, outputs=wide.spec.outputs, max_batch_size=8)
    with pytest.raises(ModelLoadError, match=message):
        await repository([Affine("start", 1), wide], value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "a cascade is an object"),
        ({"name": "e"}, "lacks ['cascade']"),
        ({"name": "e", "cascade": [], "extra": 1}, "unknown fields ['extra']"),
        ({"name": "e", "steps": [], "outputs": []}, "lacks ['cascade']"),
        ({"name": "e", "cascade": [{"model": "a"}]}, "two models or more"),
        (cascade(rule="luck"), "there is no rule 'luck'"),
        (cascade(0.0), "above 0 and at most 1"),
        (cascade(True), "is of another type"),
        (cascade(10**400), "above 0 and at most 1, got inf"),
        (cascade(-(10**400)), "above 0 and at most 1, got -inf"),
    ],
)
def test_a_file_that_declares_neither_is_refused_by_name(value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInputError) as refused:
        read_cascade(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_name_that_comes_twice_in_one_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"name": "e", "cascade": [{"model": "m", "model": "n"}]}')
    with pytest.raises(InvalidInputError, match="'model' comes twice in one object"):
        read_cascade(path)
