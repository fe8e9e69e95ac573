"""The model of Orca's tests over several processes."""

from tests.orca.parallel.conftest import six_layers, start

__all__ = ["six_layers", "start"]
