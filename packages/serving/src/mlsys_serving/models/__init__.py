"""Models of a server: what a model is, who holds it, and the app that serves it through whatever front is installed.

A front (a server extension) reads the wire, checks requests against :class:`ModelSpec` and asks :class:`Model`. An
engine writes a model (:mod:`.model`) and a source of models (:mod:`.source`). Names are imported when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_serving.models.app import DEFAULT_CONFIG, ERROR_FORMAT, create_model_app
    from mlsys_serving.models.datatypes import Array, DataType
    from mlsys_serving.models.errors import (
        DeadlineExceededError,
        ModelLoadError,
        ModelNotReadyError,
        UnknownModelError,
        UnsupportedError,
    )
    from mlsys_serving.models.loop_client import LoopClient
    from mlsys_serving.models.model import (
        BatchCounts,
        CountsExecutions,
        Executions,
        InferRequest,
        InferResponse,
        Model,
        Parameter,
        StreamingModel,
        Timing,
        UnaryModel,
    )
    from mlsys_serving.models.repository import IndexEntry, ModelRepository, ModelState
    from mlsys_serving.models.source import ArgumentSource, DirectorySource, ModelSource
    from mlsys_serving.models.spec import ModelSpec, TensorSpec


__all__ = [
    "DEFAULT_CONFIG",
    "ERROR_FORMAT",
    "ArgumentSource",
    "Array",
    "BatchCounts",
    "CountsExecutions",
    "DataType",
    "DeadlineExceededError",
    "DirectorySource",
    "Executions",
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
    "create_model_app",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "app": ["DEFAULT_CONFIG", "ERROR_FORMAT", "create_model_app"],
        "datatypes": ["Array", "DataType"],
        "errors": [
            "DeadlineExceededError",
            "ModelLoadError",
            "ModelNotReadyError",
            "UnknownModelError",
            "UnsupportedError",
        ],
        "loop_client": ["LoopClient"],
        "model": [
            "BatchCounts",
            "CountsExecutions",
            "Executions",
            "InferRequest",
            "InferResponse",
            "Model",
            "Parameter",
            "StreamingModel",
            "Timing",
            "UnaryModel",
        ],
        "repository": ["IndexEntry", "ModelRepository", "ModelState"],
        "source": ["ArgumentSource", "DirectorySource", "ModelSource"],
        "spec": ["ModelSpec", "TensorSpec"],
    },
)
