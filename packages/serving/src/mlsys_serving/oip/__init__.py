"""The Open Inference Protocol v2 front: models behind REST and gRPC with Triton's extensions (docs/open-inference.md).

Data flow of a request: ``rest`` or ``grpc_servicer`` -> a codec (``rest_codec``, ``grpc_codec``) that reads the wire
-> ``binding``, which checks it against the model's spec -> ``engine`` (deadline, statistics) -> the model -> the
codec -> the wire. A plugin writes a model (:mod:`.models.model`) and a source of models (:mod:`.models.source`).
Names are imported when they are asked for, so that importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_serving.oip.app import GrpcConfig, create_oip_app, grpc_address_of
    from mlsys_serving.oip.datatypes import Array, DataType
    from mlsys_serving.oip.errors import (
        DeadlineExceededError,
        ModelLoadError,
        ModelNotReadyError,
        UnknownModelError,
        UnsupportedError,
    )
    from mlsys_serving.oip.messages import InferRequest, InferResponse, Parameter, Timing
    from mlsys_serving.oip.models.executions import BatchCounts, Executions
    from mlsys_serving.oip.models.loop_client import LoopClient
    from mlsys_serving.oip.models.model import CountsExecutions, Model, StreamingModel, UnaryModel
    from mlsys_serving.oip.models.repository import IndexEntry, ModelRepository, ModelState
    from mlsys_serving.oip.models.source import DirectorySource, ModelSource
    from mlsys_serving.oip.models.spec import ModelSpec, TensorSpec


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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "app": ["GrpcConfig", "create_oip_app", "grpc_address_of"],
        "datatypes": ["Array", "DataType"],
        "errors": [
            "DeadlineExceededError",
            "ModelLoadError",
            "ModelNotReadyError",
            "UnknownModelError",
            "UnsupportedError",
        ],
        "messages": ["InferRequest", "InferResponse", "Parameter", "Timing"],
        "models.executions": ["BatchCounts", "Executions"],
        "models.loop_client": ["LoopClient"],
        "models.model": ["CountsExecutions", "Model", "StreamingModel", "UnaryModel"],
        "models.repository": ["IndexEntry", "ModelRepository", "ModelState"],
        "models.source": ["DirectorySource", "ModelSource"],
        "models.spec": ["ModelSpec", "TensorSpec"],
    },
)
