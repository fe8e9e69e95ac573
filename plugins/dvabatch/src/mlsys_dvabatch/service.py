"""A model with pre- and post-processing in Python, served with its requests batched between stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import ServeRequest
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.isolation import NotFiniteError, is_finite
from mlsys_serving.services import PredictService, Processing
from torch import Tensor, nn

from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.serve.preparing import Batching, Prepared, prepare, prepare_loaded
from mlsys_dvabatch.serve.spec import wire_of
from mlsys_dvabatch.stages.slicing.exits import ExitingModel
from mlsys_dvabatch.stages.slicing.partition import even_cuts
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded, Loading

_MOST_STAGES = 4


class Service(PredictService[ServedModel]):
    """A model, and what stands before and behind it.

    A request is what ``POST /predict`` brings: a JSON value, or bytes where its content is no JSON, such as an image.
    ``preprocess`` makes the model's inputs of it, without the batch dimension; requests are batched between the stages
    of the model; ``postprocess`` makes the answer, anything that JSON can hold, arrays included.

    Args:
        model: A torch module in evaluation mode, or a name, file or folder that ``mlsys dvabatch serve`` takes.
        example: Inputs of one request, [1, ...] each; of a module only.
        preprocess: Body -> a tensor or array, or a tuple of them; for encoders a text or token ids. A ValueError,
            KeyError or TypeError that it raises is the client's fault (400). None: the body is the input.
        postprocess: Output, an array, or a tuple of arrays -> answer. None: the output is the answer.
        name: Name of the model, in routes and metrics.
        policy: Name of the policy, as for ``--policy``.
        exit_confidence: Certainty at which requests leave, with ``policy="early-exit"``.
        max_batch_size: Most requests in a batch.
        num_threads: Cores of the model; None: all that this process may use.
        num_workers: Threads for pre- and post-processing.

    Raises:
        InvalidInputError: The model cannot be batched, mixes requests, or needs an example.

    Example:
        >>> service = Service(nn.Linear(2, 1).eval(), example=torch.zeros(1, 2), postprocess=lambda y: float(y[0]))
        >>> isinstance(service([1.0, 2.0]), float)
        True
    """

    system = "models"

    def __init__(
        self,
        model: nn.Module | Path | str,
        *,
        example: Tensor | tuple[Tensor, ...] | None = None,
        preprocess: Callable[[Any], Any] | None = None,
        postprocess: Callable[[Any], Any] | None = None,
        name: str = "model",
        policy: str = "auto",
        exit_confidence: float = 0.9,
        max_batch_size: int = 64,
        num_threads: int | None = None,
        num_workers: int = 2,
    ) -> None:
        super().__init__(Processing(preprocess, postprocess), num_workers)
        options = Batching(policy=policy, max_batch_size=max_batch_size)
        cache_dir = settings().cache_dir
        if isinstance(model, nn.Module):
            if example is None:
                raise InvalidInputError("a module needs example=, the inputs of one request: tensors of [1, ...]")
            inputs = example if isinstance(example, tuple) else (example,)
            loaded = _loaded(model, inputs, name, exit_confidence if policy == "early-exit" else None)
            self._prepared: Prepared = prepare_loaded(loaded, cache_dir, options)
        elif example is not None:
            raise InvalidInputError("example= is for modules; a file or name has its own")
        else:
            self._prepared = prepare(str(model), cache_dir, options, Loading(exit_confidence=exit_confidence))
        self._is_used = False
        self.name = self._prepared.loaded.name
        self.policy = self._prepared.policy_name
        self._prepare_options = replace(options, policy=self.policy)
        self._options: Any = {"max_batch_size": max_batch_size, "num_threads": num_threads}

    def __call__(self, body: Any) -> Any:
        """Return the answer to one request, computed here and now: no server, no batch.

        Args:
            body: As ``preprocess`` takes it.

        Raises:
            InvalidInputError: The model does not take what preprocessing made.
        """
        staged: Any = self._prepared.loaded.model
        inspect = getattr(staged, "inspect", None)
        row = self.fit(self._processing.made(body))
        length = staged.check(row)
        with torch.inference_mode():
            values: Any = staged.collate([ServeRequest("here", row, length=length)], length)
            for stage in range(staged.num_stages):
                values = staged.run(stage, values)
                if inspect is not None and stage < staged.num_stages - 1 and (exits := inspect(stage, values)[0]):
                    return self._processing.answer(exits[0])
            (result,) = staged.results(values)
        return self._processing.answer(result)

    def make_served(self, threads: RequestThreads) -> ServedModel:
        """See :meth:`PredictService.make_served`."""
        prepared = self._prepared
        if self._is_used:  # a policy is of one engine
            prepared = prepare_loaded(prepared.loaded, settings().cache_dir, self._prepare_options)
        self._is_used = True
        options = self._options | {"threads": threads}
        return ServedModel(prepared.loaded, prepared.costs, prepared.policy, **options)

    def fit(self, made: Any) -> Any:
        """Return what preprocessing made as a payload of the model."""
        return wire_of(self._prepared.loaded).payload(made)

    async def ask(self, served: ServedModel, request: Any, key: str) -> Any:
        """See :meth:`PredictService.ask`."""
        (result,) = await served.run_rows([request], key)
        if not is_finite(result):
            raise NotFiniteError
        return result

    def describe(self) -> str:
        """Return the service's name and policy."""
        return f"{self.name}: policy {self.policy}"


def _loaded(model: nn.Module, example: tuple[Tensor, ...], name: str, exit_confidence: float | None) -> Loaded:
    """Slice a module into stages of even time."""
    if model.training:
        raise InvalidInputError("the module is in training mode: call .eval() first")
    program = program_of(model, example)
    if exit_confidence is not None:
        return Loaded(name, ExitingModel(program, exit_confidence))
    stages = min(_MOST_STAGES, len(program.allowed_cuts) + 1)
    return Loaded(name, SlicedModel(program, even_cuts(program.timed(4), program.allowed_cuts, stages)))
