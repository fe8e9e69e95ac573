"""Tensor form of every operator: a module over tables, and for predictors a head that turns scores to answers.

Tables are ``[rows, width]`` tensors of the network's dtype (float64 unless asked otherwise). Missing values are NaN.
What a fit has left that can be trained is an ``nn.Parameter``; structure (indices, which side NaN goes) is a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

Task = Literal["classification", "multilabel", "regression", "outlier", "clustering", "density"]


def has_ties(module: nn.Module) -> bool:
    """Return whether a module stores points that may be equally near to a row; ``judged`` tells where that matters."""
    return bool(getattr(module, "stores_points", False))


def parameter(values: npt.ArrayLike) -> nn.Parameter:
    """Return a trainable copy of an array, in float64."""
    return nn.Parameter(torch.from_numpy(np.array(values, np.float64)))


class OperatorModule(nn.Module):
    """One operator. ``forward`` takes one table per input of the operator and returns one table."""

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` does, and for which rows rounding decides (see :mod:`.ties`).

        Args:
            inputs: The operator's tables.
            methods: The answers that are asked for.

        Returns:
            The table, and ``[rows]`` bool or None, where no row can be such.
        """
        return self(*inputs), None


class PredictorModule(OperatorModule):
    """A predictor: ``forward`` returns *scores*, from which the methods below derive what its source answers.

    Subclasses set ``task``, take ``classes`` and ``answers`` by name, and override what their source has; a method that
    the source lacks stays as it is here and is not offered (``answers`` says which are).

    Attributes:
        task: kind of the prediction.
        classes: the labels of a classifier, in the order of columns; empty otherwise.
        outputs: the labels of each output of a classifier of several outputs; its ``probabilities`` are side by side.
        answers: the methods of the source that this module has: "predict", "predict_proba", ...
        ranks: whether the source ranks rows within queries: a number compares only with those of the same query.
        body: tables in, scores out, of a predictor that does not compute its scores itself.
    """

    task: Task = "regression"
    outputs: tuple[tuple[object, ...], ...] = ()
    ranks = False
    body: nn.Module

    def __init__(self, *, classes: Sequence[object] = (), answers: Sequence[str] = ("predict",)) -> None:
        super().__init__()
        self.classes = tuple(classes)
        self.answers = frozenset(answers)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return scores: the body's table, unless a subclass computes its own."""
        scores: Tensor = self.body(*inputs, **options)
        return scores

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Judge as its body does, if that stores points."""
        body = getattr(self, "body", None)
        return body.judged(*inputs) if body is not None and has_ties(body) else (self(*inputs), None)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return ``[rows, classes]`` from scores, as ``predict_proba``."""
        raise InvalidInputError(f"{type(self).__name__} has no probabilities")

    def decision(self, scores: Tensor) -> Tensor:
        """Return ``[rows]`` or ``[rows, k]`` from scores, as ``decision_function``."""
        raise InvalidInputError(f"{type(self).__name__} has no decision function")

    def samples(self, scores: Tensor) -> Tensor:
        """Return ``[rows]`` from scores, as ``score_samples``: the decision values unless a subclass shifts them."""
        return self.decision(scores)

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return ``[rows, classes]`` from scores, as ``predict_log_proba``.

        Overridden where the logarithm underflows.
        """
        return self.probabilities(scores).log()

    def features(self, scores: Tensor) -> Tensor:
        """Return ``[rows, k]`` from scores, as ``transform``: the scores themselves unless a subclass has both."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices ``[rows]`` int64, or a regressor's values ``[rows]`` or ``[rows, outputs]``."""
        raise InvalidInputError(f"{type(self).__name__} has no prediction")

    def answer(self, scores: Tensor, method: str) -> Tensor:
        """Return the answer of the source's ``method``, in its shape; labels are class indices."""
        convert = {
            "predict_proba": self.probabilities,
            "predict_log_proba": self.log_probabilities,
            "decision_function": self.decision,
            "score_samples": self.samples,
            "transform": self.features,
        }
        if method == "labels" and self.classes:
            return scores.new_tensor(self.classes)[self.prediction(scores)]
        return convert.get(method, self.prediction)(scores)

    def table(self, scores: Tensor, method: str) -> Tensor:
        """Return :meth:`answer` with two dimensions at least."""
        result = self.answer(scores, method)
        return result.unsqueeze(1) if result.ndim == 1 else result

    def side_by_side(self, scores: Tensor, methods: Sequence[str], *, dtype: torch.dtype) -> Tensor:
        """Return several answers as one table of floats, as they flow on within the graph."""
        tables = [self.table(scores, method) for method in methods]
        tables = [table if table.is_floating_point() else table.to(dtype) for table in tables]
        return tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)


class Regressor(PredictorModule):
    """A predictor whose scores are its predictions, ``[rows, outputs]``; one output is answered as ``[rows]``."""

    def __init__(self, body: nn.Module, *, is_flat: bool = True, ranks: bool = False) -> None:
        super().__init__(answers=("predict",))
        self.body = body
        if ranks:
            self.ranks = True
        self.is_flat = is_flat  # the source answers [rows], not [rows, 1]

    def prediction(self, scores: Tensor) -> Tensor:
        """See the class."""
        return scores.squeeze(1) if self.is_flat and scores.shape[1] == 1 else scores


Link = Literal["logistic", "softmax", "identity", "one-vs-rest", "modified-huber"]


class Classifier(PredictorModule):
    """A classifier over a body that computes scores.

    Args:
        body: Tables in, ``[rows, 1]`` margins of the second class or ``[rows, classes]`` scores out.
        link: Scores to probabilities: ``logistic`` (one margin), ``softmax``, ``identity`` (the scores are
            probabilities), ``one-vs-rest`` (a logistic each, then normalised, as liblinear does), ``modified-huber``
            (margins cut to [-1, 1] and mapped to [0, 1], then normalised: Zhang, COLT 2004, appendix B).
    """

    task: Task = "classification"

    def __init__(self, body: nn.Module, *, classes: Sequence[object], link: Link, answers: Sequence[str]) -> None:
        super().__init__(classes=classes, answers=answers)
        self.body = body
        self.link = link

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        if self.link == "identity":
            return scores
        if self.link == "softmax":
            if scores.shape[1] == 1:  # a multinomial fit of two classes keeps one margin m, standing for [-m, m]
                scores = torch.cat([-scores, scores], dim=1)
            return scores.softmax(dim=1)
        each = (scores.clamp(-1, 1) + 1) / 2 if self.link == "modified-huber" else scores.sigmoid()
        if scores.shape[1] == 1:
            return torch.cat([1 - each, each], dim=1)
        return _normalised(each)

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for one margin, else ``[rows, classes]``."""
        return scores.squeeze(1) if scores.shape[1] == 1 else scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        if scores.shape[1] == 1 and self.link != "identity":
            return (scores.squeeze(1) > 0).long()
        return scores.argmax(dim=1)


def _normalised(each: Tensor) -> Tensor:
    """Divide rows by their sums; a row of zeros becomes uniform, as scikit-learn has it."""
    total = each.sum(dim=1, keepdim=True)
    is_zero = total == 0
    return torch.where(is_zero, 1 / each.shape[1], each / torch.where(is_zero, 1, total))


class OutlierDetector(PredictorModule):
    """A predictor whose scores are decision values ``[rows, 1]``: 1 for an inlier, -1 for an outlier.

    Args:
        body: Tables in, ``[rows, 1]`` decision values out.
        includes_zero: True makes a decision value of exactly 0 an inlier.
        offset: Difference of ``score_samples`` from the decision value.
    """

    task: Task = "outlier"
    offset: Tensor

    def __init__(self, body: nn.Module, *, includes_zero: bool, answers: Sequence[str], offset: float = 0.0) -> None:
        super().__init__(answers=answers)
        self.body = body
        self.includes_zero = includes_zero
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.float64))

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values, ``[rows]``."""
        return scores.squeeze(1)

    def samples(self, scores: Tensor) -> Tensor:
        """Return decision values before the offset is taken off, ``[rows]``."""
        return scores.squeeze(1) + self.offset

    def prediction(self, scores: Tensor) -> Tensor:
        """Return 1 or -1, ``[rows]`` int64."""
        decision = scores.squeeze(1)
        return (decision >= 0 if self.includes_zero else decision > 0).long() * 2 - 1
