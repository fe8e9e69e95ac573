"""Embeddings and rerank over HTTP, by DVABatch's staged encoders."""

__version__ = "0.1.0"
