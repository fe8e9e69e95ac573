"""Ensembles and cascades: what fits together, what each model is asked, and whose answer a row gets."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_serving.certainty import RULES, certainty
from mlsys_serving.oip import (
    DataType,
    InferRequest,
    InferResponse,
    ModelLoadError,
    ModelNotReadyError,
    ModelRepository,
    ModelSpec,
    TensorSpec,
    UnknownModelError,
)
from mlsys_serving.oip.ensembles.files import declared, read_declared

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


class Meeting(Affine):
    """Answers when as many as its partner says are under way: the two must run beside each other."""

    barrier: asyncio.Barrier

    async def infer(self, request: InferRequest) -> InferResponse:
        await self.barrier.wait()
        return await super().infer(request)


DIAMOND = {
    "name": "diamond",
    "steps": [
        {"model": "left", "inputs": {"x": "first"}, "outputs": {"y": "a"}},
        {"model": "start", "inputs": {"x": "query"}, "outputs": {"y": "first"}},
        {"model": "right", "inputs": {"x": "first"}, "outputs": {"y": "b"}},
    ],
    "outputs": ["b", "a"],
}


async def repository(models: list[Any], *values: Any) -> ModelRepository:
    made = ModelRepository(models, composed=[declared(value) for value in values])
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


async def test_a_graph_runs_steps_as_their_tensors_come_and_side_by_side() -> None:
    Meeting.barrier = asyncio.Barrier(2)
    start, left, right = Affine("start", 2), Meeting("left", 3), Meeting("right", 5)
    made = await repository([start, left, right], DIAMOND)
    spec = made.find("diamond").spec
    assert ([t.name for t in spec.inputs], [t.name for t in spec.outputs]) == (["query"], ["b", "a"])
    response = await ask(made, "diamond", [[1, 2], [3, 4]], priority=1)
    assert response.outputs["a"].tolist() == [[6, 12], [18, 24]]
    assert response.outputs["b"].tolist() == [[10, 20], [30, 40]]
    assert {start.requests[0].key, left.requests[0].key} == {"1/1", "1/0"}
    assert left.requests[0].priority == 1
    assert made.find("left").statistics.num_rows == 2


async def test_an_error_of_one_step_is_the_requests_and_the_others_are_given_up() -> None:
    Meeting.barrier = asyncio.Barrier(3)  # never full
    chained = {
        "name": "chained",
        "steps": [
            {"model": "left", "inputs": {"x": "q"}, "outputs": {"y": "a"}},
            {"model": "start", "inputs": {"x": "a"}, "outputs": {"y": "b"}},
            {"model": "right", "inputs": {"x": "q"}, "outputs": {"y": "c"}},
        ],
        "outputs": ["b", "c"],
    }
    made = await repository([Affine("start", 2), Affine("left", -1), Meeting("right", 5)], chained)
    with pytest.raises(InvalidInputError, match="start takes no such rows"):
        await ask(made, "chained", [[1, 2]])
    await made.unload("left")
    with pytest.raises((UnknownModelError, ModelNotReadyError)):
        await ask(made, "chained", [[1, 2]])


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


STEP = {"model": "start", "inputs": {"x": "q"}, "outputs": {"y": "a"}}
WIDE = {"model": "wide", "inputs": {"x": "a"}, "outputs": {"y": "b"}}
LEVEL = {"model": "start", "output": "y", "at_least": 0.9}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "e", "steps": [STEP], "outputs": ["z"]}, "no step gives the output 'z'"),
        ({"name": "e", "steps": [STEP, STEP], "outputs": ["a"]}, "two steps give 'a'"),
        ({"name": "e", "steps": [STEP | {"inputs": {"z": "q"}}], "outputs": ["a"]}, "has no input 'z'"),
        ({"name": "e", "steps": [STEP | {"inputs": {"x": "a"}}], "outputs": ["a"]}, "has a cycle: start -> start"),
        ({"name": "e", "steps": [STEP | {"model": "none"}], "outputs": ["a"]}, "there is no model 'none'"),
        ({"name": "start", "steps": [STEP], "outputs": ["a"]}, "a model 'start' already"),
        ({"name": "e", "steps": [STEP, WIDE], "outputs": ["b"]}, "takes 'x' as FP32"),
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
        ([], "an ensemble is an object"),
        ({"name": "e", "steps": []}, "lacks ['outputs']"),
        ({"name": "e", "steps": [STEP | {"extra": 1}], "outputs": ["a"]}, "unknown fields ['extra']"),
        ({"name": "e", "steps": [STEP], "outputs": ["a", "a"]}, "names an output twice"),
        ({"name": "e", "steps": [STEP], "outputs": [1]}, "names of outputs"),
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
        read_declared(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_name_that_comes_twice_in_one_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"name": "e", "steps": [{"model": "m", "inputs": {"x": "a", "x": "b"}, "outputs": {"y": "z"}}]}')
    with pytest.raises(InvalidInputError, match="'x' comes twice in one object"):
        read_declared(path)


async def test_a_model_made_of_others_takes_priorities_if_one_of_them_does() -> None:
    steps = [{"model": name, "inputs": {"x": "raw"}, "outputs": {"y": name}} for name in ("a", "b")]
    graph = {"name": "graph", "steps": steps, "outputs": ["a"]}
    for priorities, takes in (((True, False), True), ((False, False), False)):
        models = [Affine(name, 2) for name in ("a", "b")]
        for model, each in zip(models, priorities, strict=True):
            model.spec = replace(model.spec, takes_priorities=each)
        assert (await repository(models, graph)).find("graph").spec.takes_priorities is takes


async def test_an_ensemble_may_use_a_cascade_and_is_loaded_again() -> None:
    after = {
        "name": "after",
        "steps": [
            {"model": "both", "inputs": {"x": "q"}, "outputs": {"y": "scores", "level": "from"}},
            {"model": "start", "inputs": {"x": "scores"}, "outputs": {"y": "end"}},
        ],
        "outputs": ["end", "from"],
    }
    made = await repository([Affine("small", 1), Affine("large", 10), Affine("start", 2)], cascade(), after)
    response = await ask(made, "after", [[0, 9], [0, 1]])
    assert (response.outputs["end"].tolist(), response.outputs["from"].tolist()) == ([[0, 18], [0, 20]], [0, 1])
    await made.load("after")
    assert [entry.name for entry in made.index(ready_only=True)] == ["after", "both", "large", "small", "start"]
    await made.close()
