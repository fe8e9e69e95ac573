"""BatchMaker: cellular batching for RNN inference."""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_batchmaker.models.own import own_cell, own_model
    from mlsys_batchmaker.models.unfolding import fold, softmax_mean, tree
    from mlsys_batchmaker.service import Service

__version__ = "0.1.0"

__all__ = ["Service", "fold", "own_cell", "own_model", "softmax_mean", "tree"]

_ROOMS = {
    "service": ["Service"],
    "models.own": ["own_cell", "own_model"],
    "models.unfolding": ["fold", "softmax_mean", "tree"],
}
__getattr__, __dir__ = lazy_exports(__name__, _ROOMS)
