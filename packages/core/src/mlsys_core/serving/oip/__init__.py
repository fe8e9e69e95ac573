"""The Open Inference Protocol v2 front: models behind REST and gRPC with Triton's extensions (docs/open-inference.md).

Data flow of a request: ``rest`` or ``grpc_servicer`` -> a codec (``rest_codec``, ``grpc_codec``) that reads the wire
-> ``binding``, which checks it against the model's spec -> ``engine`` (deadline, statistics) -> the model -> the
codec -> the wire. A plugin writes a model (:mod:`.models.model`) and a source of models (:mod:`.models.source`).
Names are imported when they are asked for, so that importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsys_core.serving.oip.app import GrpcConfig, create_oip_app, grpc_address_of
    from mlsys_core.serving.oip.datatypes import Array, DataType
    from mlsys_core.serving.oip.errors import (
        DeadlineExceededError,
        ModelLoadError,
        ModelNotReadyError,
        UnknownModelError,
        UnsupportedError,
    )
    from mlsys_core.serving.oip.messages import InferRequest, InferResponse, Parameter, Timing
    from mlsys_core.serving.oip.models.executions import BatchCounts, Executions
    from mlsys_core.serving.oip.models.loop_client import LoopClient
    from mlsys_core.serving.oip.models.model import CountsExecutions, Model, StreamingModel, UnaryModel
    from mlsys_core.serving.oip.models.repository import IndexEntry, ModelRepository, ModelState
    from mlsys_core.serving.oip.models.source import DirectorySource, ModelSource
    from mlsys_core.serving.oip.models.spec import ModelSpec, TensorSpec

_MODULES = {
    "GrpcConfig": "app",
    "create_oip_app": "app",
    "grpc_address_of": "app",
    "Array": "datatypes",
    "DataType": "datatypes",
    "DeadlineExceededError": "errors",
    "ModelLoadError": "errors",
    "ModelNotReadyError": "errors",
    "UnknownModelError": "errors",
    "UnsupportedError": "errors",
    "BatchCounts": "models.executions",
    "Executions": "models.executions",
    "LoopClient": "models.loop_client",
    "InferRequest": "messages",
    "InferResponse": "messages",
    "Parameter": "messages",
    "Timing": "messages",
    "CountsExecutions": "models.model",
    "Model": "models.model",
    "StreamingModel": "models.model",
    "UnaryModel": "models.model",
    "IndexEntry": "models.repository",
    "ModelRepository": "models.repository",
    "ModelState": "models.repository",
    "DirectorySource": "models.source",
    "ModelSource": "models.source",
    "ModelSpec": "models.spec",
    "TensorSpec": "models.spec",
}

__all__ = [
    "Array",
    "BatchCounts",
    "CountsExecutions",
    "DataType",
    "DeadlineExceededError",
    "DirectorySource",
    "Executions",
    "GrpcConfig",
    "IndexEntry",
    "InferRequest",
    "InferResponse",
    "LoopClient",
    "Model",
    "ModelLoadError",
    "ModelNotReadyError",
    "ModelRepository",
    "ModelSource",
    "ModelSpec",
    "ModelState",
    "Parameter",
    "StreamingModel",
    "TensorSpec",
    "Timing",
    "UnaryModel",
    "UnknownModelError",
    "UnsupportedError",
    "create_oip_app",
    "grpc_address_of",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlsys_core.lazy import resolve

    return resolve(f"{__name__}.{_MODULES[name]}:{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
