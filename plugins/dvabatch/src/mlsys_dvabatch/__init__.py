"""DVABatch: multi-entry multi-exit batching for DNN services."""

__version__ = "0.1.0"
