"""Encoders of categories that scikit-learn lacks: by hash, by binary digits, by two hot elements.

Fitting leaves a table per column, a row for each category and more for those it has not seen; transforming picks rows.
``convert/encode.py`` makes the same tables trainable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.preprocessing import OrdinalEncoder
from sklearn.utils import Tags
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted, validate_data

from mlsys_windtunnel.host.lookup import bucket

Rows = npt.NDArray[np.float64]

UNSEEN, MISSING = -1, -2  # what the inner ordinal encoder answers for these


class TableEncoder(TransformerMixin, BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """Base of the encoders: codes of categories, and tables with a row for each code.

    Attributes:
        categories_: Per column, the categories seen, sorted; missing ones (None, NaN) last.
        tables_: Per column, ``[categories and further rows, width]`` float64.
        n_features_in_: Columns.
        feature_names_in_: Their names, if fitted on named ones.
    """

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803 - scikit-learn's name
        """Learn the categories of ``X`` ``[rows, columns]``, of text, numbers or missing values (NaN and None).

        Raises:
            InvalidInputError: a parameter is out of its range.
            ValueError: ``X`` is no table of categories (scikit-learn's own checks).
        """
        for name, value in self.get_params(deep=False).items():
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}; a whole number from 1 is needed")
        validate_data(self, X, skip_check_array=True)
        self.ordinal_ = OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=UNSEEN, encoded_missing_value=MISSING
        ).fit(X)
        self.categories_ = self.ordinal_.categories_
        codes = self._codes(X)
        self.tables_ = [
            self._table(categories, np.bincount(codes[:, index], minlength=len(categories)))
            for index, categories in enumerate(self.categories_)
        ]
        return self

    def transform(self, X: Any) -> Rows:  # noqa: N803
        """Return ``[rows, sum of the tables' widths]`` float64 for ``X`` ``[rows, columns]``."""
        check_is_fitted(self)
        is_frame = hasattr(X, "iloc")  # whose columns have dtypes of their own, which the ordinal encoder looks at
        validate_data(self, X, reset=False, skip_check_array=is_frame, dtype=None, ensure_all_finite="allow-nan")
        codes = self._codes(X)
        for index, table in enumerate(self.tables_):
            if (is_unseen := codes[:, index] == UNSEEN).any():
                cells = _column(X, index)[is_unseen]
                codes[is_unseen, index] = self._rows_of_unseen(len(self.categories_[index]), cells)
            assert codes[:, index].max(initial=0) < len(table)
        return np.hstack([table[codes[:, index]] for index, table in enumerate(self.tables_)])

    def get_feature_names_out(self, input_features: Any = None) -> npt.NDArray[Any]:
        """Return a column's name and a number: ``colour_0``, ``colour_1``, ..."""
        check_is_fitted(self)
        names = _check_feature_names_in(self, input_features)
        pairs = zip(names, self.tables_, strict=True)
        return np.array([f"{name}_{index}" for name, table in pairs for index in range(table.shape[1])], dtype=object)

    def _codes(self, x: Any) -> npt.NDArray[np.int64]:
        """Return indices among the categories, ``UNSEEN`` where there is none."""
        codes: npt.NDArray[np.int64] = self.ordinal_.transform(x).astype(np.int64)
        sizes = np.array([len(categories) for categories in self.categories_])
        return np.where(codes == MISSING, sizes - 1, codes)

    @abstractmethod
    def _table(self, categories: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Rows:
        """Return rows for the categories and for unseen ones; ``counts`` says how often each category came."""

    def _rows_of_unseen(self, num_categories: int, cells: npt.NDArray[Any]) -> int | npt.NDArray[np.int64]:
        """Return rows of a table for cells that hold no seen category."""
        return num_categories

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = []
        return tags


class HashEncoder(TableEncoder):
    """One-hot of a category's hash: categories of one bucket collide (the hashing trick, per column).

    The hash (BLAKE2b of the text) is the same in every process. After translation each seen category has a row of its
    own, so training can tell colliding ones apart (dissertation, section 5.2.3); an unseen one has its bucket's row.

    Args:
        n_components: Buckets, and so output columns, per input column.

    Example:
        >>> HashEncoder(n_components=4).fit_transform([["red"], ["blue"], ["red"]]).shape
        (3, 4)
    """

    def __init__(self, n_components: int = 8) -> None:
        self.n_components = n_components

    def _table(self, categories: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Rows:
        unit = np.eye(self.n_components)
        return np.vstack([unit[[bucket(cell, self.n_components) for cell in categories.tolist()]], unit])

    def _rows_of_unseen(self, num_categories: int, cells: npt.NDArray[Any]) -> int | npt.NDArray[np.int64]:
        return np.array([num_categories + bucket(cell, self.n_components) for cell in cells.tolist()])


class BinaryEncoder(TableEncoder):
    """The binary digits of a category's number, the highest first: about log2 of the categories in columns.

    Categories are numbered from 1 in sorted order; 0 is left for unseen and infrequent ones.

    Args:
        min_frequency: Categories that come less often in the fitted rows are encoded as unseen ones are.

    Example:
        >>> BinaryEncoder().fit_transform([["a"], ["b"], ["c"]]).tolist()
        [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, min_frequency: int = 1) -> None:
        self.min_frequency = min_frequency

    def _table(self, categories: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Rows:
        is_frequent = counts >= self.min_frequency
        numbers = np.append(np.where(is_frequent, np.cumsum(is_frequent), 0), 0)
        width = max(1, int(is_frequent.sum()).bit_length())
        return ((numbers[:, None] >> np.arange(width - 1, -1, -1)) & 1).astype(np.float64)


class TwoHotEncoder(TableEncoder):
    """Two hot elements per category: about twice the root of the categories in columns.

    The dissertation (section 5.4.1) says only that "there are two 'hot' elements (value of 1) in the resulting vector"
    and (5.4.2) that its width is "roughly the root of C", C being the categories. Here the frequent categories, in
    sorted order, fill a square row by row; the first hot element tells a category's row, the second its column. So
    neighbours in the order, such as routes from one airport, share an element. Unseen and infrequent categories are
    all zeros. Numbers go through ``KBinsDiscretizer(encode="ordinal")`` first.

    Args:
        min_frequency: Categories that come less often in the fitted rows are encoded as unseen ones are.

    Example:
        >>> TwoHotEncoder().fit_transform([["a"], ["b"], ["c"]]).tolist()
        [[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]]
    """

    def __init__(self, min_frequency: int = 1) -> None:
        self.min_frequency = min_frequency

    def _table(self, categories: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Rows:
        frequent = np.flatnonzero(counts >= self.min_frequency)
        side = max(1, math.ceil(math.sqrt(len(frequent))))
        num_rows = max(1, math.ceil(len(frequent) / side))
        row, column = np.divmod(np.arange(len(frequent)), side)
        table = np.zeros((len(categories) + 1, num_rows + side))
        table[frequent, row] = 1
        table[frequent, num_rows + column] = 1
        return table


def _column(x: Any, index: int) -> npt.NDArray[Any]:
    if hasattr(x, "iloc"):
        return np.asarray(x.iloc[:, index])
    if isinstance(x, list | tuple):  # as numpy would make text of a row of text and numbers
        return np.array([row[index] for row in x], dtype=object)
    return np.asarray(x)[:, index]
