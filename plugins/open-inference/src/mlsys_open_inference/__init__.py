"""The Open Inference Protocol v2 as a front of mlsys servers: REST and gRPC (docs/open-inference.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_open_inference.app import GrpcConfig, create_oip_app, front, grpc_address_of

__version__ = "0.1.0"
__all__ = ["GrpcConfig", "create_oip_app", "front", "grpc_address_of"]

__getattr__, __dir__ = lazy_exports(__name__, {"app": ["GrpcConfig", "create_oip_app", "front", "grpc_address_of"]})
