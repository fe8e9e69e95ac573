"""Factorisation machines (Rendle, ICDM 2010): linear models with factored two-way interactions of features.

score(x) = intercept + sum_i coef_i x_i + sum_{i<j} <factors_i, factors_j> x_i x_j, where the last sum is computed in
linear time as half of sum_f (sum_i factors_if x_i)^2 - sum_i factors_if^2 x_i^2 (lemma 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor
from torch.nn import functional

from mlsys_windtunnel.estimators.training import Factorization, minimise, seeded_generator

Values = npt.NDArray[np.float64]


class FactorizationMachine(Factorization):
    """Base of the classifier and the regressor.

    Attributes:
        intercept_: ``[outputs]``.
        coef_: ``[outputs, features]``.
        factors_: ``[outputs, features, n_factors]``.
        n_iter_: Epochs run.
    """

    def _fit(self, x: Any, loss: Callable[[Tensor, Tensor], Tensor], num_outputs: int) -> None:
        """Train on ``x``; ``loss`` is of scores ``[batch, outputs]`` and the indices of their rows."""
        generator = seeded_generator(self.random_state)
        width = num_outputs * self.n_factors
        intercept = torch.zeros(num_outputs, requires_grad=True)
        coef = torch.zeros(x.shape[1], num_outputs, requires_grad=True)
        factors = (torch.randn(x.shape[1], width, generator=generator) * self.init_std).requires_grad_()
        product = _sparse_product if hasattr(x, "toarray") else _dense_product

        def batch_loss(rows: Tensor) -> Tensor:
            batch = x[rows.numpy()]
            sums = product(batch, factors, 1).view(len(rows), num_outputs, self.n_factors)
            squares = product(batch, factors.square().view(x.shape[1], num_outputs, self.n_factors).sum(2), 2)
            return loss(intercept + product(batch, coef, 1) + (sums.square().sum(2) - squares) / 2, rows)

        self.n_iter_ = minimise(self, [intercept, coef, factors], batch_loss, x.shape[0], generator=generator)
        self.intercept_ = intercept.detach().numpy().astype(np.float64)
        self.coef_ = coef.detach().numpy().T.astype(np.float64)
        by_feature = factors.detach().numpy().reshape(x.shape[1], num_outputs, self.n_factors)
        self.factors_ = by_feature.transpose(1, 0, 2).astype(np.float64)

    def _scores(self, x: Any) -> Values:
        """Return scores ``[rows, outputs]``."""
        check_is_fitted(self)
        x = validate_data(self, x, accept_sparse="csr", dtype=np.float64, reset=False)
        squared = x.multiply(x).tocsr() if hasattr(x, "toarray") else x**2
        scores: Values = x @ self.coef_.T + self.intercept_
        for output, factors in enumerate(self.factors_):
            interactions = ((x @ factors) ** 2).sum(axis=1) - squared @ (factors**2).sum(axis=1)
            scores[:, output] += interactions / 2
        return scores

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class FactorizationMachineRegressor(RegressorMixin, FactorizationMachine):  # type: ignore[misc]
    """A factorisation machine for squared loss.

    Trained on a centred and scaled target with Adam; scale the features beforehand as for any gradient method.

    Args:
        n_factors: Length of a feature's factor; 0 leaves a linear model.
        learning_rate: Learning rate of Adam.
        max_iter: Epochs at most.
        batch_size: Rows per step.
        alpha: L2 penalty on all parameters.
        tol: Training stops when the loss has not fallen by this much for five epochs.
        init_std: Standard deviation of the factors to begin with.
        random_state: Seed of factors and shuffling.
        verbose: Shows a progress bar on the error stream.

    Attributes:
        intercept_: ``[1]``.
        coef_: ``[1, features]``.
        factors_: ``[1, features, n_factors]``.
        n_iter_: Epochs run.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(200, 3))
        >>> machine = FactorizationMachineRegressor(random_state=0).fit(x, x[:, 0] * x[:, 1])
        >>> bool(machine.score(x, x[:, 0] * x[:, 1]) > 0.9)
        True
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit ``X`` ``[rows, features]``, dense or sparse, to ``y`` ``[rows]``.

        Raises:
            InvalidInputError: a parameter is out of range, or training diverged.
            ValueError: bad data (scikit-learn's own checks).
        """
        self.check_parameters()
        x, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True)
        mean, scale = y.mean(), y.std() or 1.0
        target = torch.from_numpy(((y - mean) / scale).astype(np.float32))
        self._fit(x, lambda scores, rows: functional.mse_loss(scores[:, 0], target[rows]), 1)
        self.intercept_ = self.intercept_ * scale + mean
        self.coef_ = self.coef_ * scale
        self.factors_ = self.factors_ * np.sqrt(scale)
        return self

    def predict(self, X: Any) -> Values:  # noqa: N803
        """Return ``[rows]`` for ``X`` ``[rows, features]``."""
        return self._scores(X)[:, 0]


class FactorizationMachineClassifier(ClassifierMixin, FactorizationMachine):  # type: ignore[misc]
    """A factorisation machine for logistic loss, and with three classes or more a machine per class and a softmax.

    Args and attributes as :class:`FactorizationMachineRegressor`'s; outputs are the classes, or 1 for two of them.

    Attributes:
        classes_: The labels.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(200, 3))
        >>> machine = FactorizationMachineClassifier(random_state=0).fit(x, x[:, 0] * x[:, 1] > 0)
        >>> bool(machine.score(x, x[:, 0] * x[:, 1] > 0) > 0.9)
        True
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Fit ``X`` ``[rows, features]``, dense or sparse, to labels ``y`` ``[rows]``.

        Raises:
            InvalidInputError: a parameter is out of range, there is one class only, or training diverged.
            ValueError: bad data (scikit-learn's own checks).
        """
        self.check_parameters()
        x, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidInputError(
                f"y has one class, {self.classes_.tolist()}; a classifier needs rows of two classes"
            )
        if len(self.classes_) == 2:
            labels = torch.from_numpy(codes.astype(np.float32))
            logistic = functional.binary_cross_entropy_with_logits
            self._fit(x, lambda scores, rows: logistic(scores[:, 0], labels[rows]), 1)
        else:
            indices = torch.from_numpy(codes.astype(np.int64))
            self._fit(x, lambda scores, rows: functional.cross_entropy(scores, indices[rows]), len(self.classes_))
        return self

    def decision_function(self, X: Any) -> Values:  # noqa: N803
        """Return scores before the link: ``[rows]`` for two classes, else ``[rows, classes]``."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> Values:  # noqa: N803
        """Return probabilities ``[rows, classes]``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Values:  # noqa: N803
        """Return logarithms of probabilities ``[rows, classes]``."""
        scores = self._scores(X)
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        logarithms: Values = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        return logarithms

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return labels ``[rows]``."""
        scores = self._scores(X)
        labels: npt.NDArray[Any] = self.classes_[
            (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        ]
        return labels


def _dense_product(batch: Any, table: Tensor, power: int) -> Tensor:
    """Compute ``batch ** power @ table``."""
    return torch.from_numpy(batch**power).float() @ table


def _sparse_product(batch: Any, table: Tensor, power: int) -> Tensor:
    """Compute :func:`_dense_product` in time proportional to the values that are not zero."""
    return functional.embedding_bag(
        torch.from_numpy(batch.indices.astype(np.int64)),
        table,
        torch.from_numpy(batch.indptr[:-1].astype(np.int64)),
        mode="sum",
        per_sample_weights=torch.from_numpy(batch.data**power).float(),
    )
