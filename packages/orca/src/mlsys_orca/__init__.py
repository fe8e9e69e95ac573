"""Orca: LLM serving with iteration-level scheduling and selective batching."""

__version__ = "0.1.0"
