"""Refusals of a pipeline's source, which its translation repeats: forms of tables, and values within them."""
