"""WindTunnel: classical pipelines (scikit-learn, LightGBM) translated into trainable PyTorch networks.

``from mlsys_windtunnel import translate`` is the entrance; importing the package alone imports neither torch nor
scikit-learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsys_windtunnel.module import WindTunnelModule
    from mlsys_windtunnel.translate import translate

__version__ = "0.1.0"
__all__ = ["WindTunnelModule", "translate"]

_MODULES = {"WindTunnelModule": "module", "translate": "translate"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlsys_core.lazy import resolve

    return resolve(f"{__name__}.{_MODULES[name]}:{name}")
