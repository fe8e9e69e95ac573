"""Scalers and the transformations that make a column uniform or normal, with the inverses that targets need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.convert.registry import Converters, Unsupported
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.columns.scale import (
    Chain,
    Clip,
    ElementwiseAffine,
    Power,
    PowerInverse,
    Quantile,
    QuantileInverse,
    Rescale,
)
from mlsys_windtunnel.parse.functions import quantiles_are_usable
from mlsys_windtunnel.parse.names import known_name

CONVERTERS = Converters()


@CONVERTERS.of("sklearn.preprocessing", "StandardScaler")
def standard_scaler(estimator: Any) -> OperatorModule:
    """Convert mean and scale, each of which may be off."""
    return ElementwiseAffine(*_mean_and_scale(estimator))


@CONVERTERS.of("sklearn.preprocessing", "MinMaxScaler")
def min_max_scaler(estimator: Any) -> OperatorModule:
    """Convert to a product and a shift, then perhaps a cut to the range."""
    scaled = Rescale(estimator.scale_, estimator.min_)
    return Chain(scaled, Clip(*map(float, estimator.feature_range))) if estimator.clip else scaled


@CONVERTERS.of("sklearn.preprocessing", "MaxAbsScaler")
def max_abs_scaler(estimator: Any) -> OperatorModule:
    """Convert to a division; ``clip`` came with scikit-learn 1.8."""
    scaled = ElementwiseAffine(np.zeros_like(estimator.scale_), estimator.scale_)
    return Chain(scaled, Clip(-1.0, 1.0)) if getattr(estimator, "clip", False) else scaled


@CONVERTERS.of("sklearn.preprocessing", "RobustScaler")
def robust_scaler(estimator: Any) -> OperatorModule:
    """Convert median and range of quantiles, each of which may be off."""
    return ElementwiseAffine(*_center_and_scale(estimator))


def _above_zero_for_box_cox(estimator: Any) -> tuple[float | None, float | None]:
    return (float(np.nextafter(0.0, 1.0)) if estimator.method == "box-cox" else None), None


@CONVERTERS.of("sklearn.preprocessing", "PowerTransformer", bounds=_above_zero_for_box_cox)
def power_transformer(estimator: Any) -> OperatorModule:
    """Convert Yeo-Johnson or Box-Cox, then perhaps a standardisation."""
    power = Power(estimator.method, estimator.lambdas_)
    return Chain(power, standard_scaler(estimator._scaler)) if estimator.standardize else power


@CONVERTERS.of("sklearn.preprocessing", "QuantileTransformer")
def quantile_transformer(estimator: Any) -> OperatorModule | Unsupported:
    """Convert for tables with every number given.

    Of a sparse table scikit-learn transforms only what is stored. That differs from the same table written out when
    zeros were ignored in ``fit``, which declines, and when the output is normal, which no fitted attribute tells.
    """
    if not quantiles_are_usable(estimator):
        return Unsupported(
            "ignore_implicit_zeros=True, n_quantiles=1, or a column without numbers; fit it without these"
        )
    is_normal = estimator.output_distribution == "normal"
    return Quantile(estimator.quantiles_.T, estimator.references_, is_normal=is_normal)


def inverse_of(transformer: Any) -> OperatorModule | None:
    """Convert the ``inverse_transform`` of one of this file's transformers; None for any other."""
    kind = known_name(type(transformer))
    if kind == "sklearn.preprocessing.StandardScaler":
        shift, scale = _mean_and_scale(transformer)
        return Rescale(scale, shift)
    if kind == "sklearn.preprocessing.MinMaxScaler":
        return ElementwiseAffine(transformer.min_, transformer.scale_)
    if kind == "sklearn.preprocessing.MaxAbsScaler":
        return Rescale(transformer.scale_, np.zeros_like(transformer.scale_))
    if kind == "sklearn.preprocessing.RobustScaler":
        shift, scale = _center_and_scale(transformer)
        return Rescale(scale, shift)
    if kind == "sklearn.preprocessing.PowerTransformer":
        restored = PowerInverse(transformer.method, transformer.lambdas_)
        scaler = inverse_of(transformer._scaler) if transformer.standardize else None
        return restored if scaler is None else Chain(scaler, restored)
    if kind == "sklearn.preprocessing.QuantileTransformer" and quantiles_are_usable(transformer):
        is_normal = transformer.output_distribution == "normal"
        return QuantileInverse(transformer.quantiles_.T, transformer.references_, is_normal=is_normal)
    return None


def _mean_and_scale(estimator: Any) -> tuple[npt.ArrayLike, npt.ArrayLike]:
    width = estimator.n_features_in_
    return (
        estimator.mean_ if estimator.with_mean else np.zeros(width),
        estimator.scale_ if estimator.with_std else np.ones(width),
    )


def _center_and_scale(estimator: Any) -> tuple[npt.ArrayLike, npt.ArrayLike]:
    width = estimator.n_features_in_
    return (
        estimator.center_ if estimator.with_centering else np.zeros(width),
        estimator.scale_ if estimator.with_scaling else np.ones(width),
    )
