"""Matrix factorisation (Koren, Bell and Volinsky, Computer 2009): ratings from biases and factors of ids."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import RegressorMixin
from sklearn.preprocessing import OrdinalEncoder
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mlsys_windtunnel.estimators.training import Factorization, minimise, seeded_generator

UNSEEN, MISSING = -1, -2  # what the inner ordinal encoder answers for these


@dataclass(repr=False, eq=False)
class MatrixFactorizationRegressor(RegressorMixin, Factorization):  # type: ignore[misc]
    """Ratings of two columns of ids, users and items: mean + bias of the user + bias of the item + <user, item>.

    With more columns (time, place) the inner products of all pairs are added, the pairwise tensor factorisation of
    Rendle and Schmidt-Thieme (WSDM 2010); with one, biases remain. An unseen id has no bias and no factors.

    Args as :class:`.FactorizationMachineRegressor`'s; ids have biases and factors, and rows are ratings.

    Attributes:
        categories_: Per column, the ids seen, sorted.
        intercept_: The mean rating.
        tables_: Per column, ``[ids + 1, 1 + n_factors]``: a bias and a factor each; the last row, of unseen ids, is 0.
        n_iter_: Epochs run.

    Example:
        >>> ratings = [["ann", "film"], ["ann", "play"], ["bob", "film"], ["bob", "play"]]
        >>> model = MatrixFactorizationRegressor(random_state=0).fit(ratings, [5, 1, 4, 2])
        >>> model.predict([["ann", "film"], ["bob", "play"]]).round().tolist()
        [5.0, 2.0]
    """

    _: KW_ONLY
    max_iter: int = 200
    batch_size: int = 1024
    init_std: float = 0.1

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit ids ``X`` ``[ratings, columns]``, text or numbers, to ratings ``y`` ``[ratings]``.

        Raises:
            InvalidInputError: a parameter is out of range, or training diverged.
            ValueError: bad data (scikit-learn's own checks).
        """
        self.check_parameters()
        _, y = validate_data(self, X, y, dtype=None, ensure_all_finite="allow-nan", y_numeric=True)
        self.ordinal_ = OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=UNSEEN, encoded_missing_value=MISSING
        ).fit(X)
        self.categories_ = self.ordinal_.categories_
        self.intercept_, scale = float(y.mean()), float(y.std()) or 1.0
        codes = torch.from_numpy(self._codes(X))
        target = torch.from_numpy(((y - self.intercept_) / scale).astype(np.float32))

        generator = seeded_generator(self.random_state)
        tables = []
        for categories in self.categories_:
            factors = torch.randn(len(categories), self.n_factors, generator=generator) * self.init_std
            tables.append(torch.cat([torch.zeros(len(categories), 1), factors], dim=1).requires_grad_())

        def loss(rows: Tensor) -> Tensor:
            chosen = torch.stack([table[codes[rows, index]] for index, table in enumerate(tables)])
            sums = chosen.sum(0)
            interactions = (sums[:, 1:].square() - chosen[:, :, 1:].square().sum(0)).sum(1) / 2
            return torch.nn.functional.mse_loss(sums[:, 0] + interactions, target[rows])

        self.n_iter_ = minimise(self, tables, loss, len(codes), generator=generator)
        units = np.array([scale] + [np.sqrt(scale)] * self.n_factors)  # a product of two factors is a rating
        self.tables_ = [
            np.vstack([table.detach().numpy() * units, np.zeros(1 + self.n_factors)]).astype(np.float64)
            for table in tables
        ]
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return ratings ``[rows]`` of ids ``X`` ``[rows, columns]``."""
        check_is_fitted(self)
        validate_data(self, X, reset=False, dtype=None, ensure_all_finite="allow-nan")
        chosen = np.stack([table[codes] for table, codes in zip(self.tables_, self._codes(X).T, strict=True)])
        sums = chosen.sum(axis=0)
        interactions = (sums[:, 1:] ** 2 - (chosen[:, :, 1:] ** 2).sum(axis=0)).sum(axis=1) / 2
        ratings: npt.NDArray[np.float64] = self.intercept_ + sums[:, 0] + interactions
        return ratings

    def _codes(self, x: Any) -> npt.NDArray[np.int64]:
        """Return rows of the tables; the last of each for unseen ids."""
        codes: npt.NDArray[np.int64] = self.ordinal_.transform(x).astype(np.int64)
        sizes = np.array([len(categories) for categories in self.categories_])
        return np.where(codes == UNSEEN, sizes, np.where(codes == MISSING, sizes - 1, codes))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        return tags
