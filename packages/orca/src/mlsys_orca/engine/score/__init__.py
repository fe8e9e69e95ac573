"""Orca on the score (``mlsys_serving.score``): iterations as columns, from this process or a worker's reports."""
