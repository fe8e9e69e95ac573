"""Heads of tree ensembles: what their sources make of sums of leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from mlsys_windtunnel.modules.base import Classifier, Link, OperatorModule

Decision = Literal["positive", "non-negative", "likeliest"]
Output = Literal["identity", "exp", "logistic", "log1p-exp", "signed-square"]

_OUTPUTS: dict[Output, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores: scores,
    "exp": torch.exp,
    "logistic": torch.sigmoid,
    "log1p-exp": nn.functional.softplus,
    "signed-square": lambda scores: scores * scores.abs(),
}


class TreeClassifier(Classifier):
    """A classifier over sums of leaves.

    Args:
        body: See :class:`Classifier`.
        classes: The labels; of a single one all rows are.
        link: See :class:`Classifier`.
        answers: The methods of the source.
        slope: Multiplies scores before the link.
        is_normalised: Whether probabilities of several classes are divided by their sum (one-vs-rest).
        decides: For one margin: whether it must be ``positive`` or ``non-negative`` for the second class, or the class
            with the highest probability is answered (``likeliest``), so that rounding in the link decides as well.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        classes: Sequence[object],
        link: Link,
        answers: Sequence[str],
        slope: float = 1.0,
        is_normalised: bool = True,
        decides: Decision = "positive",
    ) -> None:
        super().__init__(body, classes=classes, link=link, answers=answers)
        self.slope = slope
        self.is_normalised = is_normalised
        self.decides: Decision = decides

    def probabilities(self, scores: Tensor) -> Tensor:
        """``[rows, classes]``."""
        if not self.is_normalised:
            return (scores * self.slope).sigmoid()
        return super().probabilities(scores * self.slope)

    def prediction(self, scores: Tensor) -> Tensor:
        """Class indices, ``[rows]``."""
        if len(self.classes) == 1:
            return torch.zeros_like(scores[:, 0], dtype=torch.int64)
        if self.decides == "likeliest":
            return self.probabilities(scores).argmax(dim=1)
        if self.decides == "non-negative" and scores.shape[1] == 1:
            return (scores.squeeze(1) >= 0).long()
        return super().prediction(scores)


class Mapped(OperatorModule):
    """The inverse of a link, elementwise, on a body's scores.

    Args:
        body: Tables in, ``[rows, outputs]`` out.
        output: What to make of its scores.
        slope: Multiplies scores before.
    """

    def __init__(self, body: nn.Module, output: Output, *, slope: float = 1.0) -> None:
        super().__init__()
        self.body = body
        self.output: Output = output
        self.slope = slope

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[rows, outputs]``."""
        return _OUTPUTS[self.output](self.body(*inputs) * self.slope)
