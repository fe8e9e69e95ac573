"""Number of training rows that are like a row: of its category, and with a number near its own.

Boosted trees with native categories find such things out by themselves; :class:`NearbyCounts` says them to any model.
Of flights it is the timetable, as far as the training rows show it: how many left on this route within these ten
minutes of the day, and within those before and after. No target is looked at.

Fitting leaves a row of counts for each category and slot of numbers, as the encoders of ``estimators/categories.py`` do
for categories. The count of a training row leaves the row itself out. Otherwise a flight that left alone would have a
count of 1 in training, and a new one a count of 0.

Translated, it is a table that is not trained (:class:`CountTable`). As a trainable one, as section 5.2.3 has it for
encoders, it has several times as many numbers as there are rows to train on, and overfits them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.registry import Converted, ConverterRegistry, Entry, default_registry
from mlsys_windtunnel.host.lookup import CategoryLookup, Column, Vocabulary
from mlsys_windtunnel.modules.base import OperatorModule
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted, validate_data
from torch import Tensor

from mlsys_bench.windtunnel.experiments.data import Part, Task

Rows = npt.NDArray[np.float64]

# A category, a number, and what near means of the two, for flights-3m.
NEARBY: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("route", "minute", {"width": 10, "before": 6, "after": 2, "min_frequency": 25}),
)


class CellLookup(CategoryLookup):
    """The cell of a category and a number, ``[rows, 1]``.

    Args:
        categories: Sorted.
        slots: Numbers ``low`` to ``high`` by this many slots a category; others are in the first or the last one.
        low: Least number.
        width: Width of a slot.
    """

    def __init__(self, categories: npt.NDArray[Any], *, slots: int, low: float, width: float) -> None:
        super().__init__([Vocabulary(categories)])
        self._slots, self._low, self._width = slots, low, width

    def __call__(self, columns: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return cells of ``[rows, 2]``, category and number; unknown categories have the one after the last."""
        return self.of_columns([columns[:, 0], columns[:, 1]])

    def of_columns(self, columns: Sequence[Column], *, is_without_frame: bool = False) -> npt.NDArray[np.float64]:
        """Look up two columns ``[rows]``, as :meth:`__call__` does a table."""
        categories, numbers = (
            super().of_columns(columns[:1], is_without_frame=is_without_frame)[:, 0],
            np.asarray(columns[1], np.float64),
        )
        slots = np.floor((numbers - self._low) / self._width).clip(0, self._slots - 1)
        is_known = categories < self.vocabularies[0].size
        cells = np.where(is_known, categories * self._slots + slots, self.vocabularies[0].size * self._slots)
        return cells[:, None]


class CountTable(OperatorModule):
    """Counts by cell; of the other rows while it trains, as :meth:`NearbyCounts.fit_transform` gives them.

    Args:
        table: ``[cells, columns]``: log(1 + rows).
        own: The column in which a cell counts its own rows.
    """

    table: Tensor

    def __init__(self, table: Rows, own: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.from_numpy(np.array(table, np.float64)))
        self.own = own

    def forward(self, cells: Tensor) -> Tensor:
        """Return ``[rows, columns]`` from cells ``[rows, 1]``, integers in any dtype."""
        counts = self.table[cells.long()[:, 0]]
        if self.training:
            counts[:, self.own] = (counts[:, self.own].expm1() - 1).clamp(min=0).log1p()
        return counts


class NearbyCounts(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Counts for a category and a number: log(1 + fitted rows) of the same category with numbers in slots nearby.

    Args:
        width: Width of a slot of numbers, from the least that was fitted on.
        before: Slots below the number's own that are counted, each in a column.
        after: Slots above.
        min_frequency: Categories that come less often in the fitted rows have zeros throughout, as unseen ones.

    Attributes:
        table_: ``[cells and one for unseen categories, before + 1 + after]`` float64.
        lookup_: A row's cell.

    Example:
        >>> rows = np.array([["a", 1], ["a", 2], ["a", 12], ["b", 3]], dtype=object)
        >>> np.expm1(NearbyCounts(10, before=1, after=0).fit(rows).transform(rows)).round().tolist()
        [[0.0, 2.0], [0.0, 2.0], [2.0, 1.0], [0.0, 1.0]]
    """

    def __init__(self, width: float = 10.0, before: int = 6, after: int = 2, min_frequency: int = 1) -> None:
        self.width = width
        self.before = before
        self.after = after
        self.min_frequency = min_frequency

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803 - scikit-learn's name
        """Count rows of ``X`` ``[rows, 2]``: a category and a finite number.

        Raises:
            InvalidInputError: other than two columns, or a parameter out of its range.
        """
        if self.width <= 0 or min(self.before, self.after) < 0:
            raise InvalidInputError(f"{self}: width must be above 0, before and after 0 or more")
        validate_data(self, X, skip_check_array=True)
        if self.n_features_in_ != 2:
            raise InvalidInputError(f"a category and a number are needed; X has {self.n_features_in_} columns")
        words, numbers = _columns(X)
        categories, counts = np.unique(words, return_counts=True)
        categories = categories[counts >= self.min_frequency]
        low = float(numbers.min())
        slots = int((numbers.max() - low) // self.width) + 1
        self.lookup_ = CellLookup(categories, slots=slots, low=low, width=self.width)
        cells = self.lookup_.of_columns([words, numbers])[:, 0].astype(np.int64)
        counted = np.bincount(cells, minlength=len(categories) * slots + 1)[:-1].reshape(-1, slots)
        padded = np.pad(np.log1p(counted), ((0, 0), (self.before, self.after)))
        near = self.before + 1 + self.after
        windows = np.lib.stride_tricks.sliding_window_view(padded, near, axis=1)
        self.table_ = np.vstack([windows.reshape(-1, near), np.zeros(near)])
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Rows:  # noqa: N803
        """Fit and transform rows without counting a row itself."""
        rows = self.fit(X, y).transform(X)
        rows[:, self.before] = np.log1p(np.maximum(np.expm1(rows[:, self.before]) - 1, 0))
        return rows

    def transform(self, X: Any) -> Rows:  # noqa: N803
        """Return ``[rows, before + 1 + after]`` float64, the lowest slot first, for ``X`` ``[rows, 2]``."""
        check_is_fitted(self)
        validate_data(self, X, reset=False, skip_check_array=True)
        rows: Rows = self.table_[self.lookup_.of_columns(_columns(X))[:, 0].astype(np.int64)]
        return rows

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Return both columns' names with the slots below or above: ``route_minute_-1``, ``route_minute_+0``, ..."""
        check_is_fitted(self)
        word, number = _check_feature_names_in(self, input_features)
        return np.array([f"{word}_{number}_{at:+d}" for at in range(-self.before, self.after + 1)], dtype=object)


def nearby_steps() -> list[tuple[str, NearbyCounts, list[str]]]:
    """Return steps of a column transformer."""
    return [(f"{word}-{number}", NearbyCounts(**options), [word, number]) for word, number, options in NEARBY]


def with_counts(task: Task) -> Task:
    """Return the same rows with the counts as further numbers, for models that are given columns as they are."""
    from sklearn.compose import ColumnTransformer

    counts = ColumnTransformer(nearby_steps())
    of_train = counts.fit_transform(task.train.frame)
    names = tuple(counts.get_feature_names_out())

    def counted(part: Part, rows: Rows) -> Part:
        return replace(part, frame=part.frame.assign(**dict(zip(names, rows.T, strict=True))))

    others = (counted(part, counts.transform(part.frame)) for part in (task.valid, task.test))
    numbers = (*task.numbers, *names)
    return Task(task.name, numbers, task.words, counted(task.train, of_train), *others)


def converter(estimator: NearbyCounts) -> Converted:
    """Convert to a look-up of cells, and their counts."""
    return Converted(CountTable(estimator.table_, estimator.before), estimator.lookup_, num_codes=1)


def registry() -> ConverterRegistry:
    """Return the built-in converters, and the one for :class:`NearbyCounts`."""
    own = Entry(f"{__name__}.NearbyCounts", converter)
    return default_registry().adding(own)


def _columns(x: Any) -> tuple[npt.NDArray[Any], Rows]:
    x = x if hasattr(x, "iloc") else np.asarray(x, dtype=object)
    word, number = (x.iloc[:, 0], x.iloc[:, 1]) if hasattr(x, "iloc") else (x[:, 0], x[:, 1])
    return np.asarray(word), np.asarray(number, np.float64)
