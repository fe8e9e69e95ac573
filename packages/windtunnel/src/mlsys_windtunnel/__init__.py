"""WindTunnel: classical pipelines (scikit-learn, LightGBM) translated into trainable PyTorch networks.

``from mlsys_windtunnel import translate`` is the entrance; importing the package alone imports neither torch nor
scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlsys_windtunnel.parse.graph import FittedSize, Kind, Operator, PipelineGraph, Value
from mlsys_windtunnel.parse.load import load_estimator
from mlsys_windtunnel.parse.pipeline import parse_pipeline

if TYPE_CHECKING:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.estimators import WindTunnelClassifier, WindTunnelRegressor
    from mlsys_windtunnel.finetune.tune import fine_tune
    from mlsys_windtunnel.module import WindTunnelModule

__version__ = "0.1.0"
__all__ = [
    "FittedSize",
    "Kind",
    "Operator",
    "PipelineGraph",
    "Value",
    "WindTunnelClassifier",
    "WindTunnelModule",
    "WindTunnelRegressor",
    "fine_tune",
    "load_estimator",
    "parse_pipeline",
    "translate",
]

_MODULES = {
    "WindTunnelClassifier": "finetune.estimators",
    "WindTunnelModule": "module",
    "WindTunnelRegressor": "finetune.estimators",
    "fine_tune": "finetune.tune",
    "translate": "convert.translation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlsys_core.lazy import resolve

    return resolve(f"{__name__}.{_MODULES[name]}:{name}")
