"""The check that a translation answers as its source does, as WindTunnel's own converters are tested."""

from tests.windtunnel.conftest import same_answers
from tests.windtunnel.converters.conftest import same_in_each_layout

__all__ = ["same_answers", "same_in_each_layout"]
