"""Label propagation and label spreading: a new row's classes are those of the rows near it."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from mlsys_windtunnel.convert.decompose import make_kernel
from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import Classifier, OperatorModule
from mlsys_windtunnel.modules.kernel.decompose import KernelProjection
from mlsys_windtunnel.modules.kernel.neighbors import NeighborAverage, Shares

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.semi_supervised", "LabelPropagation", "LabelSpreading")
def label_propagation(estimator: Any) -> OperatorModule | Unsupported:
    """Convert to shares of the classes among the fitted rows, by the RBF kernel or by the nearest neighbours."""
    samples, shares = estimator.X_, np.asarray(estimator.label_distributions_, np.float64)
    body: nn.Module | None = None
    if estimator.kernel == "knn":
        k = int(estimator.nn_fit.n_neighbors)
        by_product = estimator.nn_fit._fit_method == "brute"
        body = NeighborAverage(samples, shares, k=k, p=2.0, scale=None, by_distance=False, by_product=by_product)
    elif estimator.kernel == "rbf":
        kernel = make_kernel(samples, "rbf", gamma=estimator.gamma)
        body = None if kernel is None else KernelProjection(kernel, shares)
    if body is None:
        name = getattr(estimator.kernel, "__name__", estimator.kernel)
        return Unsupported(f"kernel=the function {name}; fit it with 'rbf' or 'knn'")
    return Classifier(
        Shares(body), classes=class_labels(estimator.classes_), link="identity", answers=("predict", "predict_proba")
    )
