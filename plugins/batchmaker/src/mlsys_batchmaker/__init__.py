"""BatchMaker: cellular batching for RNN inference."""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_batchmaker.models.own import own_cell, own_model
    from mlsys_batchmaker.service import Service

__version__ = "0.1.0"

__all__ = ["Service", "own_cell", "own_model"]

__getattr__, __dir__ = lazy_exports(__name__, {"service": ["Service"], "models.own": ["own_cell", "own_model"]})
