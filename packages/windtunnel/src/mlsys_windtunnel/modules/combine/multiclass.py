"""Many classes from binary members (one-vs-rest, one-vs-one, output codes), and several targets, a member for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.combine.combine import Layout
from mlsys_windtunnel.modules.ties import sizes
from torch import Tensor, nn


class BinaryMembers(nn.Module):
    """The answers of binary members, a column each; a member that saw one class only always answers it.

    Args:
        members: In the order of columns, the layout of a member's table or the constant.
    """

    def __init__(self, members: Sequence[Layout | float]) -> None:
        super().__init__()
        self.members = list(members)

    def forward(self, tables: Sequence[Tensor], method: str) -> Tensor:
        """Return ``[rows, members]``: "score", "predict_proba" (of the second class) or "predict"."""
        columns, remaining = [], iter(tables)
        for member in self.members:
            if isinstance(member, Layout):
                columns.append(self._column(member, next(remaining), method))
            else:
                columns.append(torch.full_like(tables[0][:, :1], member))
        return torch.cat(columns, dim=1)

    @staticmethod
    def _column(layout: Layout, table: Tensor, method: str) -> Tensor:
        if method == "score":
            return layout.score(table)
        answer = layout.take(table, method)
        return answer[:, 1:2] if method == "predict_proba" else answer


class OneVsRest(PredictorModule):
    """A member for each class or label against the rest; two classes have one member.

    Args:
        members: See :class:`BinaryMembers`.
        threshold: A single member's score, or a label's, is for it beyond this.
        classes: The labels; none for several labels at once.
    """

    def __init__(
        self, members: BinaryMembers, *, threshold: float, classes: Sequence[object], answers: Sequence[str]
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.task: Task = "classification" if classes else "multilabel"
        self.members = members
        self.threshold = threshold

    def forward(self, *tables: Tensor) -> Tensor:
        """Return ``[rows, members]`` scores, then as many probabilities where the source has them."""
        scores: Tensor = self.members(tables, "score")
        if "predict_proba" not in self.answers:
            return scores
        return torch.cat([scores, self.members(tables, "predict_proba")], dim=1)

    def _scores(self, scores: Tensor) -> Tensor:
        return scores[:, : len(self.members.members)]

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``, summing to 1; for several labels at once each has its own."""
        each = scores[:, len(self.members.members) :]
        if each.shape[1] == 1:
            each = torch.cat([1 - each, each], dim=1)
        if self.task == "multilabel":
            return each
        total = each.sum(dim=1, keepdim=True)
        return each / torch.where(total == 0, 1, total)

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for one member, else ``[rows, members]``."""
        each = self._scores(scores)
        return each.squeeze(1) if each.shape[1] == 1 else each

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices ``[rows]``, or 0 and 1 for each label ``[rows, labels]``."""
        each = self._scores(scores)
        if self.task == "multilabel":
            return (each > self.threshold).long()
        return (each[:, 0] > self.threshold).long() if each.shape[1] == 1 else each.argmax(dim=1)


class OneVsOne(PredictorModule):
    """A member for each pair of classes: votes, and between equal votes the sum of confidences.

    Args:
        members: Pairs in lexical order; see :class:`BinaryMembers`.
        threshold: For two classes, the second is answered where its decision value is beyond this.
    """

    task: Task = "classification"

    def __init__(
        self, members: BinaryMembers, *, threshold: float, classes: Sequence[object], answers: Sequence[str]
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.members = members
        self.threshold = threshold

    def forward(self, *tables: Tensor) -> Tensor:
        """Return decision values ``[rows, classes]``."""
        named, confidences = self.members(tables, "predict"), self.members(tables, "score")
        zeros = torch.zeros_like(named[:, 0])
        votes = [zeros] * len(self.classes)
        totals = [zeros] * len(self.classes)
        for number, (first, second) in enumerate(combinations(range(len(self.classes)), 2)):
            totals[first] = totals[first] - confidences[:, number]
            totals[second] = totals[second] + confidences[:, number]
            votes[first] = votes[first] + (named[:, number] == 0)
            votes[second] = votes[second] + (named[:, number] == 1)
        total = torch.stack(totals, dim=1)
        return torch.stack(votes, dim=1) + total / (3 * (total.abs() + 1))

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]``."""
        return scores[:, 1] if len(self.classes) == 2 else scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return (scores[:, 1] > self.threshold).long() if len(self.classes) == 2 else scores.argmax(dim=1)


class OutputCode(PredictorModule):
    """The class whose code word is nearest to the members' scores.

    Args:
        members: See :class:`BinaryMembers`.
        code_book: ``[classes, members]``.
    """

    task: Task = "classification"
    stores_points = True
    code_book: Tensor

    def __init__(
        self, members: BinaryMembers, *, code_book: npt.ArrayLike, classes: Sequence[object], answers: Sequence[str]
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.members = members
        self.register_buffer("code_book", torch.tensor(code_book, dtype=torch.float64))

    def forward(self, *tables: Tensor) -> Tensor:
        """Return squared distances ``[rows, classes]``, less each row's own square.

        Summed member by member as scikit-learn does: members without margins tie exactly, and rounding decides.
        """
        return self._distances(self.members(tables, "score"))

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Compute the table, and the rows where code words may tie.

        Sums of integers are exact, and then the first is the nearest.
        """
        scores = self.members(inputs, "score")
        table = self._distances(scores)
        if table.shape[1] < 2:
            return table, None
        size = sizes(scores, self.code_book)
        gaps = table.topk(2, dim=1, largest=False).values.diff(dim=1).squeeze(1)
        is_level = gaps <= max(1e-9, 64 * torch.finfo(table.dtype).eps) * size * size
        return table, is_level & (scores != scores.round()).any(dim=1)

    def _distances(self, scores: Tensor) -> Tensor:
        products = scores[:, :1] * self.code_book[:, 0]
        for number in range(1, scores.shape[1]):
            products = products + scores[:, number : number + 1] * self.code_book[:, number]
        distances: Tensor = (self.code_book**2).sum(dim=1) - 2 * products
        return distances

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return scores.argmin(dim=1)


class Outputs(PredictorModule):
    """Classifiers of several targets side by side.

    Args:
        layouts: Layout of each member's table.
        outputs: The labels of each member.
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
