"""The live page of mlsys servers: requests as rows, batches as columns."""

__version__ = "0.1.0"
