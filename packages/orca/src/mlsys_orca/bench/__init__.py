"""Benchmarks: scheduling policies against each other, and the ORCA paper's evaluation (docs/orca-benchmarks.md)."""
