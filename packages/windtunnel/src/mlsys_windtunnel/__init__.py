"""WindTunnel: classical pipelines (scikit-learn, LightGBM) translated into trainable PyTorch networks.

``from mlsys_windtunnel import translate`` is the entrance; importing the package alone imports neither torch nor
scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlsys_windtunnel.graph import FittedSize, Kind, Operator, PipelineGraph, Value
from mlsys_windtunnel.load import load_estimator
from mlsys_windtunnel.parse import parse_pipeline

if TYPE_CHECKING:
    from mlsys_windtunnel.module import WindTunnelModule
    from mlsys_windtunnel.translation import translate

__version__ = "0.1.0"
__all__ = [
    "FittedSize",
    "Kind",
    "Operator",
    "PipelineGraph",
    "Value",
    "WindTunnelModule",
    "load_estimator",
    "parse_pipeline",
    "translate",
]

_MODULES = {"WindTunnelModule": "module", "translate": "translation"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlsys_core.lazy import resolve

    return resolve(f"{__name__}.{_MODULES[name]}:{name}")
