"""Orca's ranks as Ray's actors."""

__version__ = "0.1.0"
