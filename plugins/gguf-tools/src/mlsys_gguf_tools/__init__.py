"""Quantise language models into GGUF files."""

__version__ = "0.1.0"
