"""Nimble: ahead-of-time stream scheduling of PyTorch models."""

__version__ = "0.1.0"
