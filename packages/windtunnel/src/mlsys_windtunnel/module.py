"""A translated pipeline: an ``nn.Module`` that answers as its source does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.report import facts_html
from torch import Tensor, nn

from mlsys_windtunnel.backends.direct.program import direct_program
from mlsys_windtunnel.checks.table import no_rows
from mlsys_windtunnel.checks.values import rounded
from mlsys_windtunnel.frontend import Frontend, pack
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.modules.base import PredictorModule
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.ties import UndecidedError

ROWS_PER_CHUNK = 4_096  # rows that the numpy-facing methods run at once, so that intermediate tables stay in caches
METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")


@dataclass(frozen=True, slots=True)
class Reference:
    """A copy of a fitted pipeline that answers in its translation's stead; modules share it, files do not hold it."""

    source: Any

    def answer(self, method: str, x: Table) -> Any:
        """Return the source's own answer for a table in a form that it takes; floats come as float64."""
        answer = getattr(self.source, method)(x)
        return [_dense(each) for each in answer] if isinstance(answer, list) else _dense(answer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        """Return the same: nothing changes a source."""
        return self


def _dense(answer: Any) -> Any:
    array = answer.toarray() if hasattr(answer, "toarray") else np.asarray(answer)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


class WindTunnelModule(nn.Module):
    """A pipeline as a module. ``forward`` is for tensors and training; the source's methods take and give numpy.

    ``predict``, ``predict_proba``, ``predict_log_proba``, ``decision_function``, ``score_samples`` and ``transform``
    exist exactly where the source has them.

    Args:
        frontend: Raw input to the packed table that ``forward`` takes.
        network: The trainable part.

    Attributes:
        reference: Decides ties between the points that the source stores; None: rows with such ties are refused.

    Example:
        >>> module = translate(fitted_pipeline)  # doctest: +SKIP
        >>> module.predict_proba(frame)  # doctest: +SKIP
        >>> module(torch.from_numpy(module.encode(frame))).sum().backward()  # doctest: +SKIP
    """

    def __init__(self, frontend: Frontend, network: Network) -> None:
        super().__init__()
        self.frontend = frontend
        self.network = network
        self.reference: Reference | None = None

    @property
    def predictor(self) -> PredictorModule | None:
        """The last operator if it answers more than ``transform``; None for a transformer."""
        network = self._modules["network"]
        assert isinstance(network, Network)
        last = network.output
        return last if isinstance(last, PredictorModule) else None

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The labels of a classifier, in the order of ``predict_proba``'s columns."""
        if self.predictor is None or not self.predictor.classes:
            raise AttributeError("this module is no classifier, so it has no classes_")
        return np.asarray(self.predictor.classes)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the network computes in: float64 if a part does (soft trees round for themselves)."""
        tensors = chain(self.network.parameters(), self.network.buffers())  # lazily: each prediction asks
        kinds = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
        first = next(kinds, torch.float64)
        return torch.float64 if first == torch.float64 or torch.float64 in kinds else first

    @property
    def torch_device(self) -> torch.device:
        """Return where the network's tensors lie; the host, if it has none."""
        tensors = chain(self.network.parameters(), self.network.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _repr_html_(self) -> str:
        """Return a table of the operators and answers, for notebooks."""
        operators = (type(each).__name__.removesuffix("Module") for each in self.network.operators)
        num_trained = sum(each.numel() for each in self.parameters() if each.requires_grad)
        facts: dict[str, object] = {
            "operators": ", ".join(operators),
            "input": f"{sum(width for _, width in self.network.frontier)} numbers a row, once encoded",
            "answers": ", ".join(name for name in METHODS if hasattr(self, name)),
            "trainable parameters": f"{num_trained:,}",
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if self.predictor is not None and self.predictor.classes:
            facts["classes"] = ", ".join(map(str, self.predictor.classes[:8]))
        return facts_html("Translated pipeline", facts)

    def has_features(self, method: str) -> bool:
        """Return whether a method answers members' answers on the way, not those of the last operator."""
        network = self._modules["network"]
        assert isinstance(network, Network)
        return method == "transform" and bool(network.features)

    def encode(self, x: Table) -> npt.NDArray[np.float64]:
        """Encode raw input (numpy, pandas, sparse) to the packed float64 table that :meth:`forward` takes.

        Raises:
            InvalidInputError: other columns than the source was fitted on.
        """
        return self.frontend.encode(x)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the source's main answer: probabilities, else decision values, else predictions or features.

        The answer is differentiable.

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
            method = self._method(name)
            reference = vars(self).get("reference")
            return method if reference is None else self._with_ties(method, name, reference)
        return super().__getattr__(name)

    def _with_ties(self, method: Callable[[Table], Any], name: str, reference: Reference) -> Callable[[Table], Any]:
        """Return a method that asks the source about a table with rows that only its search decides."""

        def answer(x: Table) -> Any:
            try:
                return method(x)
            except UndecidedError:
                if not self.network.is_as_translated:  # trained since: a nested network alone is as it was
                    raise
                return reference.answer(name, self.frontend.columns_of(x).whole)

        return answer

    def _method(self, name: str) -> Callable[[Table], npt.NDArray[Any]]:
        predictor = self.predictor
        if predictor is None:
            if name == "transform":
                return lambda x: self._run(x, name)
        elif name == "predict" and predictor.classes:
            labels = np.asarray(predictor.classes)
            return lambda x: _labelled(labels, self._run(x, name))
        elif predictor.outputs and name in predictor.answers:
            return self._method_of_outputs(name, predictor)
        elif self.has_features(name):
            return lambda x: self._features(x)
        elif name in predictor.answers:
            return lambda x: self._run(x, name)
        raise AttributeError(f"the source of this module has no {name}")

    def _features(self, x: Table) -> npt.NDArray[Any]:
        """Return members' answers side by side, or ``[members, rows, k]`` where the source has them so."""
        table = self._run(x, "transform")
        if not self.network.features_are_deep:
            return table
        return np.stack(np.split(table, len(self.network.features), axis=1))

    def _method_of_outputs(self, name: str, predictor: PredictorModule) -> Callable[[Table], Any]:
        """Return a method of a classifier of several outputs: labels side by side, or a list of probabilities."""
        outputs = [np.asarray(labels) for labels in predictor.outputs]
        if name == "predict":

            def predict(x: Table) -> npt.NDArray[Any]:
                indices = self._run(x, name)
                return np.stack(
                    [_labelled(labels, indices[:, number]) for number, labels in enumerate(outputs)], axis=1
                )

            return predict
        ends = np.cumsum([len(labels) for labels in outputs])[:-1]
        return lambda x: np.split(self._run(x, name), ends, axis=1)

    def _run(self, x: Table, method: str) -> npt.NDArray[Any]:
        """Return the source's answer to a method, with labels as class indices; without torch where possible."""
        tables = self.frontend.tables(x, method)
        num_rows = len(tables[0])
        if not num_rows:
            raise no_rows(tables[0].shape)
        network = self._modules["network"]  # as an attribute it takes a microsecond
        assert isinstance(network, Network)
        program = direct_program(network)
        run = self._in_torch if program is None or self.has_features(method) else program
        if num_rows <= ROWS_PER_CHUNK or (program is not None and run is program and not program.steps):
            return run(tables, method)
        parts = []
        for start in range(0, num_rows, ROWS_PER_CHUNK):
            try:
                parts.append(run([table[start : start + ROWS_PER_CHUNK] for table in tables], method))
            except UndecidedError as error:
                raise error.moved(start) from None
        return np.concatenate(parts)

    def _in_torch(self, tables: Sequence[npt.NDArray[np.float64]], method: str) -> npt.NDArray[Any]:
        dtype = self.dtype
        table = pack(tables)
        if dtype == torch.float32:
            table = rounded(table, "float32")
        packed = torch.from_numpy(table).to(self.torch_device, dtype)
        with torch.inference_mode():
            result = self.network(packed, checks=True, methods=(method,))
            if self.predictor is not None and not self.has_features(method):
                result = self.predictor.answer(result, method)
            answer: npt.NDArray[Any] = result.cpu().numpy()
        return answer


def _labelled(labels: npt.NDArray[Any], indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    try:
        found: npt.NDArray[Any] = labels[indices]
    except IndexError as error:
        raise InvalidInputError(f"it answers with more than its {labels.size} classes: damaged or forged") from error
    return found
