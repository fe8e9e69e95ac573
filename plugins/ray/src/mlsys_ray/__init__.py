"""Orca's ranks placed by Ray."""

__version__ = "0.1.0"
