"""Prepared models in files: a schedule as JSON beside raw tensors, which are mapped; nothing is unpickled (ADR 39)."""
