"""Isolation of clients: the check at load that requests do not mix, and batches whose bad requests fail alone."""

from mlsys_serving.isolation.check import batch_sizes, require_isolated
from mlsys_serving.isolation.compare import Draw, Kind, draw_like, rounding
from mlsys_serving.isolation.halves import NotFiniteError, blamed, is_finite, run_in_halves

__all__ = [
    "Draw",
    "Kind",
    "NotFiniteError",
    "batch_sizes",
    "blamed",
    "draw_like",
    "is_finite",
    "require_isolated",
    "rounding",
    "run_in_halves",
]
