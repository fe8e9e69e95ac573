"""Training: forward and backward graphs, scheduled ahead of time and replayed (docs/nimble-training.md)."""
