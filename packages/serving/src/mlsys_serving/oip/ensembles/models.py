"""Ensembles and cascades as models: each of their requests becomes requests to the repository's models.

Every model batches what it gets with all others' requests, its answers are checked, and its statistics count them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop.clock import WallClock

from mlsys_serving.certainty import certainty
from mlsys_serving.oip.binding import checked_outputs
from mlsys_serving.oip.datatypes import Array
from mlsys_serving.oip.ensembles.plan import LEVEL, Cascade, Declared, Ensemble
from mlsys_serving.oip.errors import UnsupportedError
from mlsys_serving.oip.messages import InferRequest, InferResponse
from mlsys_serving.oip.models.model import UnaryModel
from mlsys_serving.oip.models.spec import ModelSpec

if TYPE_CHECKING:
    from mlsys_serving.oip.models.repository import ModelRepository


class _Composed:
    """A model that asks others.

    Args:
        spec: Of the whole.
        repository: Has the others.
    """

    def __init__(self, spec: ModelSpec, repository: ModelRepository) -> None:
        self.spec = spec
        self._repository, self._clock = repository, WallClock()

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
                priority=version.settings.priority(request.priority),
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


class EnsembleModel(_Composed):
    """A directed graph of models; a step runs as soon as its tensors are there, beside others.

    Args:
        ensemble: The graph.
        repository: Has its models.

    Raises:
        InvalidInputError: They do not fit together.
    """

    def __init__(self, ensemble: Ensemble, repository: ModelRepository) -> None:
        super().__init__(ensemble.spec(lambda name: _spec(repository, name)), repository)
        self._ensemble, self._needs = ensemble, ensemble.order()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the outputs of the last models. Raises as the models do."""
        tensors = dict(request.inputs)
        steps = self._ensemble.steps
        done = [asyncio.Event() for _ in steps]

        async def run(number: int) -> None:
            for other in self._needs[number]:
                await done[other].wait()
            step = steps[number]
            inputs = {own: tensors[name] for own, name in step.inputs.items() if name in tensors}
            outputs = await self._ask(step.model, str(number), request, inputs, list(step.outputs))
            tensors.update({name: outputs[own] for own, name in step.outputs.items()})
            done[number].set()

        tasks = [asyncio.ensure_future(run(number)) for number in range(len(steps))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return InferResponse({name: tensors[name] for name in self._ensemble.outputs})


class CascadeModel(_Composed):
    """Models by size; rows of which one is not certain go on to the next.

    Args:
        cascade: The models and their rules.
        repository: Has the models.

    Raises:
        InvalidInputError: They do not fit together.
    """

    def __init__(self, cascade: Cascade, repository: ModelRepository) -> None:
        super().__init__(cascade.spec(lambda name: _spec(repository, name)), repository)
        self._cascade = cascade
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


def composed_model(declared: Declared, repository: ModelRepository) -> UnaryModel:
    """Return the model that is declared.

    Raises:
        InvalidInputError: Its models do not fit together, or one is missing.
    """
    return EnsembleModel(declared, repository) if isinstance(declared, Ensemble) else CascadeModel(declared, repository)


def _spec(repository: ModelRepository, name: str) -> ModelSpec:
    return repository.find(name).spec
