"""The single tree of errors that mlsys raises on purpose.

Each message says what was wrong, what was got, what is allowed and what to do next. The command line prints it as one
line and exits with ``exit_code``; anything else that a plugin's part raises, a command's too, becomes a
:class:`PluginError` that names the part, and ``MLSYS_DEBUG=1`` shows its traceback.
"""

from __future__ import annotations


class MlsysError(Exception):
    """Base of all errors raised on purpose by mlsys and its plugins."""

    exit_code = 1


class InvalidInputError(MlsysError, ValueError):
    """A value from outside (an argument, a file, a request) is not acceptable."""

    exit_code = 2


class MissingDependencyError(MlsysError):
    """An optional package, model or tool is not installed; the message names the command that adds it."""


class KernelUnavailableError(MissingDependencyError):
    """A native kernel can neither be compiled here nor found in the cache; whatever it speeds up has a slower path."""


class DeviceError(MlsysError):
    """A device is absent, unusable or was asked for something it cannot do."""


class MemoryPlanError(MlsysError):
    """A memory plan, arena, pool or budget was used against its rules."""


class PluginError(MlsysError):
    """A plugin could not be found, loaded or registered; the message names its distribution."""


class ServingError(MlsysError):
    """A request could not be served; ``ServingLoop`` and the HTTP front translate it for the client."""
