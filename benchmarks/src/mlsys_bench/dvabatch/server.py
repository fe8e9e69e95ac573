"""DVABatch with a model of 2 ms a batch, the server of `mlsys bench core-oip-front`: HTTP port, gRPC port.

`benchmarks/peers/pytriton/server.py` is real Triton with the same models.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import LinearStage, StagedModel
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_open_inference import GrpcConfig, create_oip_app
from mlsys_serving.http import serve
from mlsys_serving.models import DataType, ModelRepository, ModelSpec, TensorSpec
from torch import Tensor, nn


class Double(nn.Module):
    """A module that doubles its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Double ``x``: ``[n, 4]`` to ``[n, 4]``."""
        return x * 2


class Served(ServedModel):
    """A model with the names that the clients ask for."""

    def _spec(self, loaded: Loaded, max_batch_size: int) -> ModelSpec:
        tensors = [TensorSpec(name, DataType.FP32, (-1, 4)) for name in ("x", "y")]
        return ModelSpec(name=loaded.name, inputs=(tensors[0],), outputs=(tensors[1],), max_batch_size=max_batch_size)


def slowly(module: Callable[..., Any], _example: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Return ``module`` slowed down by 2 ms."""

    def run(*values: Tensor) -> Any:
        time.sleep(0.002)
        return module(*values)

    return run


def main(http_port: int, grpc_port: int) -> int:
    """Serve until SIGTERM."""
    torch.set_num_threads(1)
    program = program_of(Double().eval(), (torch.ones(1, 4),))
    costs = StagedModel((LinearStage(0.002, 0.0),))
    models = [
        Served(
            Loaded(name, SlicedModel(program, [], compile_stage=slowly)),
            costs,
            LoadPolicy(),
            max_batch_size=size,
            num_threads=1,
        )
        for name, size in (("unbatched", 1), ("batched", 16))
    ]
    app = create_oip_app(ModelRepository(models), grpc=GrpcConfig(port=grpc_port))
    return serve(app, port=http_port, on_ready=lambda address: print(address.url, flush=True))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
