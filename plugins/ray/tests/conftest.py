"""The model of Orca's tests over several processes."""

from tests.orca.parallel.conftest import checkpoints, six_layers, start

__all__ = ["checkpoints", "six_layers", "start"]
