"""``tritonclient`` over REST and gRPC, many at once: each gets its own answer, and one at fault its own error."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from mlsys_dvabatch.scheduling.policies.load import LoadPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_open_inference import GrpcConfig, create_oip_app, grpc_address_of
from mlsys_serving.http import BackgroundServer
from mlsys_serving.http.record import make_logger
from mlsys_serving.models import ModelRepository
from torch import Tensor, nn

from tests.oracles.tally import Tally

WIDTH = 6


class Divides(nn.Module):
    """torch's transformer layer; a request whose first number is 0 has an infinite answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(1) / x[:, 0, :1]


@contextmanager
def served(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Serve ``module``; yields the addresses of REST and gRPC."""
    program = program_of(module.eval(), (torch.randn(1, 3, WIDTH),))
    model = SlicedModel(program, program.allowed_cuts[:: max(1, len(program.allowed_cuts) // 3)][:3])
    costs = parse_stages(",".join(["1+1"] * model.num_stages))
    front = ServedModel(Loaded("module", model), costs, LoadPolicy(), num_threads=1)
    logger = make_logger("json", stream=io.StringIO())
    app = create_oip_app(ModelRepository([front]), grpc=GrpcConfig(), logger=logger)
    with BackgroundServer(app) as server:
        address = grpc_address_of(app)
        yield server.url.removeprefix("http://"), f"{address.host}:{address.port}"


def many_clients(tally: Tally, *, requests: int, at_once: int = 12) -> None:
    """Send ``requests`` from ``at_once`` threads, REST and gRPC in turn, every ninth at fault."""
    module = Divides().eval()
    rng = np.random.default_rng(3)
    given = rng.standard_normal((requests, 3, WIDTH)).astype(np.float32)
    given[::9, 0, 0] = 0
    with torch.no_grad():
        expected = [module(torch.from_numpy(row[None]))[0].numpy() for row in given]

    with served(module) as (rest, grpc), ThreadPoolExecutor(at_once) as threads:

        def ask(number: int) -> tuple[int, Any]:
            client: Any = httpclient if number % 2 else grpcclient
            with client.InferenceServerClient(rest if number % 2 else grpc) as connection:
                tensor = client.InferInput("x", [1, 3, WIDTH], "FP32")
                tensor.set_data_from_numpy(given[number : number + 1])
                try:
                    return number, connection.infer("module", [tensor]).as_numpy("output_0")[0]
                except client.InferenceServerException as error:
                    return number, error

        for number, answer in threads.map(ask, range(requests)):
            is_right = not isinstance(answer, Exception) and np.allclose(  # bytes hold NaN and infinity too
                answer, expected[number], rtol=1e-3, atol=1e-4, equal_nan=True
            )
            tally.check(is_right, f"client {number}: {answer!r} for {expected[number]!r}")
