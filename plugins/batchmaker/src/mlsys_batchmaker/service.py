"""A model with pre- and post-processing in Python, served with the cells of all requests batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.services import PredictService, Processing
from prometheus_client.registry import Collector

from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.model import Model, Payload, Tensor
from mlsys_batchmaker.models.store import NAMES, holds_model, load_by_name, make_model
from mlsys_batchmaker.serve.metrics import EngineMetrics
from mlsys_batchmaker.serve.oip_model import OipModel


class Service(PredictService[OipModel]):
    """A model of cells, and what stands before and behind it.

    A request is what ``POST /predict`` brings: a JSON value, or bytes where its content is no JSON. ``preprocess``
    makes the tensors of one sequence or tree of it, by name; cells of all requests are batched; ``postprocess`` makes
    the answer of the outputs, by name too.

    Args:
        model: A model, its directory, or a name that ``mlsys batchmaker save`` takes.
        preprocess: Body -> tensors by name: arrays, lists, numbers or texts. A ValueError, KeyError or TypeError that
            it raises is the client's fault (400). None: the body is an object of them.
        postprocess: Outputs, arrays by name -> answer, anything that JSON can hold. None: the outputs.
        config: Settings of the engine.
        num_workers: Threads for pre- and post-processing.

    Raises:
        InvalidInputError: There is no such model.

    Example:
        >>> from mlsys_batchmaker.models.sequence import lstm_model
        >>> with Service(lstm_model(num_words=9, hidden_size=8), preprocess=lambda body: {"words": body}) as service:
        ...     service([1, 2, 3])["hidden"].shape
        (8,)
    """

    system = "models"

    def __init__(
        self,
        model: Model | Path | str,
        *,
        preprocess: Callable[[Any], Mapping[str, Any]] | None = None,
        postprocess: Callable[[Payload], Any] | None = None,
        config: EngineConfig | None = None,
        num_workers: int = 2,
    ) -> None:
        super().__init__(Processing(preprocess, postprocess), num_workers)
        self.model = model if isinstance(model, Model) else _model_of(model)
        self._config = EngineConfig() if config is None else config
        self._engine: Engine | None = None  # engine of calls without a server; made by the first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, body: Any) -> Any:
        """Return the answer to one request, without a server; calls of several threads are batched.

        Args:
            body: As ``preprocess`` takes it.

        Raises:
            InvalidInputError: The model does not take what preprocessing made.
        """
        if self._engine is None:
            self._engine = Engine(self.model, self._config)
        payload = self.fit(self._processing.made(body))
        return self._processing.answer(self._engine.submit(payload).result().outputs)

    def close(self) -> None:
        """End the engine of calls without a server. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def make_served(self, threads: RequestThreads) -> OipModel:
        """See :meth:`PredictService.make_served`."""
        return OipModel(self.model, self._config, threads=threads)

    def collectors(self, served: OipModel) -> Sequence[Collector]:
        """See :meth:`PredictService.collectors`."""
        return [EngineMetrics(lambda: [] if served.is_closed else [served])]

    async def ask(self, served: OipModel, request: Payload, key: str) -> Payload:
        """See :meth:`PredictService.ask`."""
        return (await served.answer(request, key)).outputs

    def describe(self) -> str:
        """Return the service's name."""
        return self.model.name

    def fit(self, made: Any) -> Payload:
        """Return the tensors of a request with the model's dtypes.

        Raises:
            InvalidInputError: One is missing, unknown, or not of its dtype.
        """
        inputs = {tensor.name: tensor for tensor in self.model.architecture.inputs}
        names = ", ".join(inputs)
        if not isinstance(made, Mapping):
            raise InvalidInputError(f"got {type(made).__name__}; the model takes tensors by name: {names}")
        if unknown := sorted(map(str, made.keys() - inputs.keys())):
            raise InvalidInputError(f"there is no input {unknown[0]!r}; the model takes {names}")
        if missing := [name for name, tensor in inputs.items() if not tensor.is_optional and name not in made]:
            raise InvalidInputError(f"the input {missing[0]!r} is missing; the model takes {names}")
        return {name: _array(inputs[name], value) for name, value in made.items()}


def _model_of(named: Path | str) -> Model:
    if named in NAMES:
        return make_model(str(named))
    path = Path(named).expanduser()
    if not path.is_dir() or not holds_model(path):
        raise InvalidInputError(f"{named!s} is no model: give a model's directory, or one of {', '.join(NAMES)}")
    return load_by_name(path)


def _array(tensor: Tensor, value: Any) -> np.ndarray[Any, Any]:
    if tensor.dtype == "bytes":
        many = [value] if isinstance(value, str | bytes) else list(value)
        found = np.array([each.encode() if isinstance(each, str) else each for each in many], dtype=np.object_)
    else:
        found = np.asarray(value)
        is_whole = found.dtype.kind in "iu"
        if not is_whole and (found.dtype.kind != "f" or tensor.dtype == "int64"):
            raise InvalidInputError(f"{tensor.name} takes {tensor.dtype}, got {found.dtype}")
        found = found.astype(tensor.dtype)
    if found.ndim != len(tensor.shape) or any(
        size not in (-1, got) for size, got in zip(tensor.shape, found.shape, strict=True)
    ):
        raise InvalidInputError(f"{tensor.name} has shape {list(tensor.shape)} (-1: any), got {list(found.shape)}")
    return found
