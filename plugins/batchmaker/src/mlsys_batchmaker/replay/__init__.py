"""Cellular and request-level batching on one trace, in virtual time."""
