"""Training: forward and backward graphs made ahead of time and replayed (docs/nimble-training.md)."""
