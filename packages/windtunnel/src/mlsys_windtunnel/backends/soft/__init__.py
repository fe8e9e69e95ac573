"""Soft mode: translated pipelines whose trees are smooth, so that gradients reach all that was fitted (5.2.2)."""
