"""DVABatch: multi-entry multi-exit batching for DNN services."""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_dvabatch.service import Service

__version__ = "0.1.0"

__all__ = ["Service"]

__getattr__, __dir__ = lazy_exports(__name__, {"service": ["Service"]})
