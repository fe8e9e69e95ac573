"""A translated pipeline: an ``nn.Module`` that answers as its source does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_windtunnel.frontend import Frontend, Table
from mlsys_windtunnel.modules.base import PredictorModule
from mlsys_windtunnel.network import Network

ROWS_PER_CHUNK = 16_384  # rows that the numpy-facing methods run at once: bounds the memory of intermediate tables
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")


class WindTunnelModule(nn.Module):
    """A pipeline as a module. ``forward`` is for tensors and training; the source's methods take and give numpy.

    ``predict``, ``predict_proba``, ``predict_log_proba``, ``decision_function``, ``score_samples`` and ``transform``
    exist exactly where the source has them.

    Args:
        frontend: Raw input to the packed table that ``forward`` takes.
        network: The trainable part.

    Example:
        >>> module = translate(fitted_pipeline)  # doctest: +SKIP
        >>> module.predict_proba(frame)  # doctest: +SKIP
        >>> module(torch.from_numpy(module.encode(frame))).sum().backward()  # doctest: +SKIP
    """

    def __init__(self, frontend: Frontend, network: Network) -> None:
        super().__init__()
        self.frontend = frontend
        self.network = network

    @property
    def predictor(self) -> PredictorModule | None:
        """The last operator if it answers more than ``transform``; None for a transformer."""
        last = self.network.output
        return last if isinstance(last, PredictorModule) else None

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The labels of a classifier, in the order of ``predict_proba``'s columns."""
        if self.predictor is None or not self.predictor.classes:
            raise AttributeError("this module is no classifier, so it has no classes_")
        return np.asarray(self.predictor.classes)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in."""
        tensors = chain(self.network.parameters(), self.network.buffers())  # lazily: each prediction asks
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float64)

    def encode(self, x: Table) -> npt.NDArray[np.float64]:
        """Raw input (numpy, pandas, sparse) to the packed float64 table that :meth:`forward` takes.

        Raises:
            InvalidInputError: other columns than the source was fitted on.
        """
        return self.frontend.encode(x)

    def forward(self, x: Tensor) -> Tensor:
        """The source's main answer, differentiable: probabilities, else decision values, else predictions or features.

        Args:
            x: ``[rows, width]``, as :meth:`encode` gives it.
        """
        result: Tensor = self.network(x)
        predictor = self.predictor
        if predictor is None:
            return result
        for method in ("predict_proba", "decision_function", "transform", "predict"):
            if method in predictor.answers:
                return predictor.table(result, method)
        return result

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return self._method(name)
        return super().__getattr__(name)

    def _method(self, name: str) -> Callable[[Table], npt.NDArray[Any]]:
        predictor = self.predictor
        if predictor is None:
            if name == "transform":
                return lambda x: self._run(x, lambda result: result)
        elif name == "predict" and predictor.classes:
            labels = np.asarray(predictor.classes)
            return lambda x: labels[self._run(x, predictor.prediction)]
        elif predictor.outputs and name in predictor.answers:
            return self._method_of_outputs(name, predictor)
        elif name in predictor.answers:
            return lambda x: self._run(x, lambda scores: predictor.answer(scores, name))
        raise AttributeError(f"the source of this module has no {name}")

    def _method_of_outputs(self, name: str, predictor: PredictorModule) -> Callable[[Table], Any]:
        """Of a classifier of several outputs: labels side by side, or a list of probabilities."""
        outputs = [np.asarray(labels) for labels in predictor.outputs]
        if name == "predict":

            def predict(x: Table) -> npt.NDArray[Any]:
                places = self._run(x, predictor.prediction)
                return np.stack([labels[places[:, number]] for number, labels in enumerate(outputs)], axis=1)

            return predict
        ends = np.cumsum([len(labels) for labels in outputs])[:-1]
        convert = predictor.log_probabilities if name == "predict_log_proba" else predictor.probabilities
        return lambda x: np.split(self._run(x, convert), ends, axis=1)

    def _run(self, x: Table, convert: Callable[[Tensor], Tensor]) -> npt.NDArray[Any]:
        """Encode, run in chunks without gradients, convert, and join."""
        encoded = self.encode(x)
        if not len(encoded):
            raise InvalidInputError("the input has no rows; at least one is needed")
        packed = torch.from_numpy(encoded).to(self.dtype)
        chunks = (packed,) if len(encoded) <= ROWS_PER_CHUNK else torch.split(packed, ROWS_PER_CHUNK)
        with torch.inference_mode():
            parts = [convert(self.network(chunk)).cpu().numpy() for chunk in chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
