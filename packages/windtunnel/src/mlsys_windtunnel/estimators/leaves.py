"""The leaves that rows reach in boosted trees, as features for another model (dissertation, section 5.4.1, Pipe3)."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.utils import Tags, get_tags
from sklearn.utils.validation import check_is_fitted


class LeafEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """One-hot of the leaf that a row reaches in each tree of a LightGBM model, trees side by side.

    Args:
        estimator: An ``LGBMClassifier`` or ``LGBMRegressor``, fitted by this encoder; None: a classifier as it comes.

    Attributes:
        estimator_: Fitted.
        num_leaves_: Leaves of each tree, ``[trees]``.
        n_features_in_: Columns.

    Example:
        >>> import numpy as np
        >>> from lightgbm import LGBMRegressor
        >>> x = np.arange(100.0)[:, None]
        >>> encoder = LeafEncoder(LGBMRegressor(n_estimators=2, num_leaves=3, verbose=-1)).fit(x, x[:, 0])
        >>> encoder.transform(x).shape
        (100, 6)
    """

    def __init__(self, estimator: Any = None) -> None:
        self.estimator = estimator

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        """Fit the trees to ``X`` ``[rows, columns]`` and ``y`` ``[rows]``."""
        from lightgbm import LGBMClassifier

        model = LGBMClassifier(verbose=-1) if self.estimator is None else clone(self.estimator)
        self.estimator_ = model.fit(X, y)
        trees = self.estimator_.booster_.dump_model()["tree_info"]
        self.num_leaves_ = np.array([tree["num_leaves"] for tree in trees], np.int64)
        self.n_features_in_ = self.estimator_.n_features_in_
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803
        """Return ``[rows, leaves of all trees]``, a sparse float64 matrix (CSR) with a 1 for each tree."""
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

        check_is_fitted(self)
        leaves = np.asarray(self.estimator_.predict(X, pred_leaf=True), np.int64).reshape(len(X), -1)
        starts = np.cumsum(self.num_leaves_) - self.num_leaves_
        rows, trees = leaves.shape
        row_starts = np.arange(0, rows * trees + 1, trees)
        return csr_matrix(
            (np.ones(rows * trees), (leaves + starts).reshape(-1), row_starts), (rows, int(self.num_leaves_.sum()))
        )

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return ``tree0_leaf0``, ..."""
        check_is_fitted(self)
        names = [f"tree{tree}_leaf{leaf}" for tree, size in enumerate(self.num_leaves_) for leaf in range(size)]
        return np.array(names, dtype=object)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.allow_nan = self.estimator is None or get_tags(self.estimator).input_tags.allow_nan
        return tags
