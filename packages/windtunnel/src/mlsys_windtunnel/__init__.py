"""WindTunnel: classical pipelines (scikit-learn, LightGBM) translated into trainable PyTorch networks.

``from mlsys_windtunnel import translate`` is the entrance; importing the package alone imports neither torch nor
scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_windtunnel.convert.translation import translate
    from mlsys_windtunnel.finetune.estimators import WindTunnelClassifier, WindTunnelRegressor
    from mlsys_windtunnel.finetune.tune import fine_tune
    from mlsys_windtunnel.finetune.update import UpdateOptions, update
    from mlsys_windtunnel.module import WindTunnelModule
    from mlsys_windtunnel.parse.graph import Kind, Operator, PipelineGraph, Value
    from mlsys_windtunnel.parse.load import load_estimator
    from mlsys_windtunnel.parse.pipeline import parse_pipeline

__version__ = "0.1.0"
__all__ = [
    "Kind",
    "Operator",
    "PipelineGraph",
    "UpdateOptions",
    "Value",
    "WindTunnelClassifier",
    "WindTunnelModule",
    "WindTunnelRegressor",
    "fine_tune",
    "load_estimator",
    "parse_pipeline",
    "translate",
    "update",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "convert.translation": ["translate"],
        "finetune.estimators": ["WindTunnelClassifier", "WindTunnelRegressor"],
        "finetune.tune": ["fine_tune"],
        "finetune.update": ["UpdateOptions", "update"],
        "module": ["WindTunnelModule"],
        "parse.graph": ["Kind", "Operator", "PipelineGraph", "Value"],
        "parse.load": ["load_estimator"],
        "parse.pipeline": ["parse_pipeline"],
    },
)
