"""Orca's policies against each other, and the ORCA paper's evaluation."""
