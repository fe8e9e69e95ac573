"""Several targets at once, a member for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.combine.combine import Layout
from torch import Tensor


class Outputs(PredictorModule):
    """Classifiers of several targets side by side.

    Args:
        layouts: Layout of each member's table.
        outputs: The labels of each member.
        answers: The methods of the source.
    """

    task: Task = "multilabel"

    def __init__(
        self, layouts: Sequence[Layout], *, outputs: Sequence[Sequence[object]], answers: Sequence[str]
    ) -> None:
        super().__init__(answers=answers)
        self.outputs = tuple(tuple(labels) for labels in outputs)
        self.layouts = list(layouts)

    def forward(self, *tables: Tensor) -> Tensor:
        """Return ``[rows, outputs]`` class indices, then each member's probabilities where the source has them."""
        methods = ["predict", *(method for method in self.answers if method == "predict_proba")]
        return torch.cat(
            [
                layout.take(table, method)
                for method in methods
                for layout, table in zip(self.layouts, tables, strict=True)
            ],
            dim=1,
        )

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return all members' probabilities side by side, ``[rows, sum of classes]``."""
        return scores[:, len(self.layouts) :]

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows, outputs]`` int64."""
        return scores[:, : len(self.layouts)].long()


class Chain(PredictorModule):
    """Binary classifiers of several targets; each has read the answers of those before it.

    Args:
        layouts: Layout of each member's table, in the order of targets.
        answers: The methods of the source.
    """

    task: Task = "multilabel"

    def __init__(self, layouts: Sequence[Layout], *, answers: Sequence[str]) -> None:
        super().__init__(answers=answers)
        self.layouts = list(layouts)
        self.methods = [method for method in ("labels", "predict_proba", "decision_function") if self._has(method)]

    def _has(self, method: str) -> bool:
        return method == "labels" or method in self.answers

    def forward(self, *tables: Tensor) -> Tensor:
        """Return the answers that the source has, ``[rows, outputs]`` each.

        These are labels, probabilities of the second class, and decision values.
        """
        columns = []
        for method in self.methods:
            for layout, table in zip(self.layouts, tables, strict=True):
                answer = layout.take(table, method)
                columns.append(answer[:, 1:2] if method == "predict_proba" else answer)
        return torch.cat(columns, dim=1)

    def _part(self, scores: Tensor, method: str) -> Tensor:
        start = self.methods.index(method) * len(self.layouts)
        return scores[:, start : start + len(self.layouts)]

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities of the second class, ``[rows, outputs]``."""
        return self._part(scores, "predict_proba")

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values ``[rows, outputs]``."""
        return self._part(scores, "decision_function")

    def prediction(self, scores: Tensor) -> Tensor:
        """Return labels themselves, ``[rows, outputs]``."""
        return self._part(scores, "labels")
