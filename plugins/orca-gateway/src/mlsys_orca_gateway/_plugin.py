"""Register mlsys-orca-gateway with mlsys; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.plugins.hookspecs import hookimpl
from mlsys_core.plugins.specs import ServerExtensionSpec


@hookimpl
def mlsys_register_server_extensions() -> Iterable[ServerExtensionSpec]:
    """Return the extension of ``mlsys orca serve``."""
    return [
        ServerExtensionSpec(
            name="orca-gateway",
            help="Responses, Messages, files and batches; streams that outlive their connection and the server.",
            systems=("orca",),
            factory="mlsys_orca_gateway.extension:extend",
            options="mlsys_orca_gateway.options:GatewayOptions",
        )
    ]
