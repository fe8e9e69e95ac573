"""WindTunnel: classical pipelines translated into trainable PyTorch networks."""

__version__ = "0.1.0"
