"""Answers of a model to encode, made without running one."""

from __future__ import annotations

from typing import Any

from mlsys_open_inference.engine import Answer
from mlsys_serving.models import InferRequest, InferResponse, ModelSpec, TensorSpec
from mlsys_serving.models.model import Parameter
from mlsys_serving.models.version import Version


class _Model:
    """A model that has a spec and is never run."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    async def infer(self, request: InferRequest) -> InferResponse:
        raise NotImplementedError

    async def close(self) -> None:
        """Do nothing."""


def answer(
    *outputs: tuple[TensorSpec, Any], request_id: str = "", max_batch_size: int = 0, **parameters: Parameter
) -> Answer:
    """Return the answer of version 3 of model "m" with these outputs."""
    specs = tuple({spec.name: spec for spec, _ in outputs}.values())
    spec = ModelSpec(name="m", version="3", inputs=(), outputs=specs, max_batch_size=max_batch_size)
    request = InferRequest(key="1", model_name="m", model_version="3", inputs={}, outputs=(), request_id=request_id)
    return Answer(Version(_Model(spec)), request, list(outputs), dict(parameters))
