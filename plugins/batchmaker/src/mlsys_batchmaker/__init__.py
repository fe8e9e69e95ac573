"""BatchMaker: cellular batching for RNN inference."""

__version__ = "0.1.0"
