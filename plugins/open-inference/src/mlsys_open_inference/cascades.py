"""Cascades: models by size, of which the first that is certain of a row answers it.

A file declares one (:func:`read_cascade`), it is checked against the models that it names (:meth:`Cascade.spec`), and
is a model itself (:class:`CascadeModel`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.clock import WallClock
from mlsys_serving.certainty import RULES, certainty
from mlsys_serving.models.datatypes import Array, DataType
from mlsys_serving.models.errors import UnsupportedError
from mlsys_serving.models.model import InferRequest, InferResponse, UnaryModel
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.models.spec import ModelSpec, TensorSpec

from mlsys_open_inference.binding import checked_outputs

SpecOf = Callable[[str], ModelSpec]  # raises if there is no such model
LEVEL = "level"
_MAX_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Level:
    """One model of a cascade, and when its answer is taken."""

    model: str
    output: str = ""  # with its scores, [rows, classes]; empty: the last level
    rule: str = "confidence"
    at_least: float = 0.0  # certainty


@dataclass(frozen=True, slots=True)
class Cascade:
    """Models by size; a row's answer is that of the first that is certain."""

    name: str
    levels: tuple[Level, ...]

    def spec(self, spec_of: SpecOf) -> ModelSpec:
        """Return the spec of the whole: the models' own, and the number of the level that answered each row.

        Raises:
            InvalidInputError: The models differ in their tensors, have no rows, or a level has no scores.
        """
        specs = [spec_of(level.model) for level in self.levels]
        first, rows = specs[0], _rows(self.name, specs)
        if not rows:
            raise InvalidInputError(f"cascade {self.name!r}: its models take no batches, so no row can go on alone")
        for level, spec in zip(self.levels, specs, strict=True):
            if not (_alike(first.inputs, spec.inputs) and _alike(first.outputs, spec.outputs)):
                raise InvalidInputError(
                    f"cascade {self.name!r}: models {first.name!r} and {level.model!r} have other inputs or outputs"
                )
            if not level.output:
                continue
            scores = _tensor(self.name, spec, "output", level.output)
            if not scores.datatype.is_floating or len(scores.shape) != 2:
                raise InvalidInputError(
                    f"cascade {self.name!r}: output {level.output!r} of model {level.model!r} is "
                    f"{scores.datatype.value} {list(scores.shape)}; a rule needs [rows, classes] of floats"
                )
        answered = TensorSpec(LEVEL, DataType.INT64, (-1,))
        if any(tensor.name == LEVEL for tensor in first.outputs):
            raise InvalidInputError(f"cascade {self.name!r}: its models have an output {LEVEL!r} themselves")
        return ModelSpec(
            name=self.name,
            inputs=first.inputs,
            outputs=(*first.outputs, answered),
            platform="cascade",
            max_batch_size=rows,
            is_stateful=any(spec.is_stateful for spec in specs),
        )

    def model(self, repository: ModelRepository) -> UnaryModel:
        """Return the model that asks those of ``repository``. Raises as :meth:`spec`."""
        return CascadeModel(self, repository)


class CascadeModel:
    """Models by size; rows of which one is not certain go on to the next.

    Every model batches its rows with all others' requests, its answers are checked, and its statistics count them.

    Args:
        cascade: The models and their rules.
        repository: Has the models.

    Raises:
        InvalidInputError: They do not fit together.
    """

    def __init__(self, cascade: Cascade, repository: ModelRepository) -> None:
        self.spec = cascade.spec(lambda name: repository.find(name).spec)
        self._cascade, self._repository, self._clock = cascade, repository, WallClock()
        self._names = [tensor.name for tensor in self.spec.outputs if tensor.name != LEVEL]

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return each row's answer, and which model gave it. Raises as the models do."""
        left = np.arange(request.num_rows)
        levels = np.zeros(request.num_rows, np.int64)
        merged: dict[str, Array] = {}
        for number, level in enumerate(self._cascade.levels):
            inputs = {name: array[left] for name, array in request.inputs.items()}
            found = await self._ask(level.model, str(number), request, inputs, self._names)
            levels[left] = number
            for name, array in found.items():
                if number == 0:
                    merged[name] = np.array(array)
                elif array.shape[1:] == merged[name].shape[1:]:
                    merged[name][left] = array
                else:
                    raise InvalidInputError(
                        f"output {name!r} of model {level.model!r} has other sizes: send rows alone"
                    )
            if not level.output:
                break
            left = left[certainty(found[level.output], level.rule) < level.at_least]
            if not left.size:
                break
        return InferResponse({**merged, LEVEL: levels})

    async def close(self) -> None:
        """Free nothing: the models are the repository's."""

    async def _ask(
        self, model: str, part: str, request: InferRequest, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Return outputs of a model.

        Raises:
            UnknownModelError, ModelNotReadyError: It has been unloaded.
            InvalidInputError: It takes fewer rows now, after it was loaded again.
            Exception: The model's own.
        """
        version = self._repository.find(model)
        if version.unary is None:
            raise UnsupportedError(f"model {model!r} gives any number of responses, and cannot be part of another")
        num_rows = len(next(iter(inputs.values()))) if version.spec.max_batch_size else 1
        if version.spec.max_batch_size and num_rows > version.spec.max_batch_size:
            raise InvalidInputError(f"model {model!r} takes {version.spec.max_batch_size} rows, got {num_rows}")
        started_s = self._clock.now()
        version.hold()
        try:
            inner = InferRequest(
                key=f"{request.key}/{part}",
                model_name=model,
                model_version=version.spec.version,
                inputs=inputs,
                outputs=tuple(outputs),
                num_rows=num_rows,
                request_id=request.request_id,
                parameters=request.parameters,
                priority=request.priority,
                deadline_s=request.deadline_s,
            )
            response = await version.unary.infer(inner)
            found = checked_outputs(response, inner, version, is_partial=False)
        finally:
            version.release()
        version.statistics.succeed(
            num_rows, self._clock.now() - started_s, response.timing, now_ms=time.time_ns() // 1_000_000
        )
        return {spec.name: array for spec, array in found}


def read_cascade(path: Path) -> Cascade:
    """Return the cascade that a file declares: ``{"name", "cascade"}``.

    Raises:
        InvalidInputError: It cannot be read, or declares none; the message names the file.
    """
    try:
        if path.stat().st_size > _MAX_NBYTES:
            raise InvalidInputError(f"{path} is larger than {_MAX_NBYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    try:
        return declared(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error


def declared(value: Any) -> Cascade:
    """Return the cascade in a JSON value.

    Raises:
        InvalidInputError: It is none.

    Example:
        >>> small = {"model": "small", "output": "y", "at_least": 0.9}
        >>> declared({"name": "a", "cascade": [small, {"model": "large"}]}).levels[1]
        Level(model='large', output='', rule='confidence', at_least=0.0)
    """
    fields = _fields(value, "a cascade", {"name": str, "cascade": list})
    given = fields["cascade"]
    if len(given) < 2:
        raise InvalidInputError("a cascade has two models or more")
    levels = [_level(fields["name"], each, is_last=each is given[-1]) for each in given]
    return Cascade(fields["name"], tuple(levels))


def check_rule(name: str, rule: str, at_least: float) -> None:
    """Check the rule of a level.

    Raises:
        InvalidInputError: No such rule, or a certainty that is none.
    """
    if rule not in RULES:
        raise InvalidInputError(f"cascade {name!r}: there is no rule {rule!r}; give {', '.join(RULES)}")
    if not 0 < at_least <= 1:
        raise InvalidInputError(f"cascade {name!r}: a certainty is above 0 and at most 1, got {at_least}")


def _tensor(name: str, spec: ModelSpec, what: str, wanted: str) -> TensorSpec:
    tensors = spec.inputs if what == "input" else spec.outputs
    found = next((tensor for tensor in tensors if tensor.name == wanted), None)
    if found is None:
        known = ", ".join(repr(tensor.name) for tensor in tensors)
        raise InvalidInputError(f"{name!r}: model {spec.name!r} has no {what} {wanted!r}; it has {known}")
    return found


def _alike(first: Sequence[TensorSpec], second: Sequence[TensorSpec]) -> bool:
    def known(tensors: Sequence[TensorSpec]) -> list[tuple[str, DataType, tuple[int, ...]]]:
        return sorted((tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)

    return known(first) == known(second)


def _rows(name: str, specs: Sequence[ModelSpec]) -> int:
    """Return the most rows of a request; 0: the models have no rows."""
    sizes = {spec.max_batch_size for spec in specs}
    if 0 in sizes and len(sizes) > 1:
        raise InvalidInputError(f"{name!r}: some of its models take batches of rows, and some do not")
    return min(sizes)


def _level(name: str, value: Any, *, is_last: bool) -> Level:
    if is_last:
        return Level(_fields(value, "the last level", {"model": str})["model"])
    wanted = {"model": str, "output": str, "at_least": (int, float)}
    fields = _fields(value, "a level", wanted, {"rule": str})
    level = Level(fields["model"], fields["output"], fields.get("rule", "confidence"), _double(fields["at_least"]))
    check_rule(name, level.rule, level.at_least)
    return level


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, none of whose names may come twice: the first of the two would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:100]!r} comes twice in one object")
    return found


def _fields(value: Any, what: str, wanted: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    """Return an object that has all fields that are wanted, of their types, and no others."""
    known = {**wanted, **(optional or {})}
    if not isinstance(value, dict):
        raise InvalidInputError(f"{what} is an object, got {type(value).__name__}")
    missing, unknown = wanted.keys() - value.keys(), value.keys() - known.keys()
    if missing or unknown:
        problem = f"lacks {sorted(missing)}" if missing else f"has the unknown fields {sorted(unknown)}"
        raise InvalidInputError(f"{what} has the fields {list(known)}; this one {problem}")
    for name, kind in known.items():
        if name in value and (not isinstance(value[name], kind) or isinstance(value[name], bool)):
            raise InvalidInputError(f"{name!r} of {what} is of another type: {type(value[name]).__name__}")
    return value
