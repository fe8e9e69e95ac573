"""Register the Open Inference Protocol with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import ServerExtensionSpec

EXTENSION = ServerExtensionSpec(
    name="open-inference",
    help="The Open Inference Protocol v2: REST with binary tensors, and gRPC with --grpc-port.",
    systems=("batchmaker", "dvabatch", "windtunnel", "models"),
    factory="mlsys_open_inference.extension:extend",
    options="mlsys_open_inference.extension:OipOptions",
    is_front=True,
)


@hookimpl
def mlsys_register_server_extensions() -> Iterable[ServerExtensionSpec]:
    """Return the front."""
    return [EXTENSION]
