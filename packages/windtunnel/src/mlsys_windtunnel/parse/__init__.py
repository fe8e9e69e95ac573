"""Fitted pipelines as graphs of operators."""
