"""Translated pipelines behind core's Open Inference Protocol front, and rows of JSON beside it."""
