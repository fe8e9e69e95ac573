"""Further protocols of Orca's server: Responses, Messages, files, batches, streams that outlive the server."""

__version__ = "0.1.0"
