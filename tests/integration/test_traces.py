"""Traces of servers of the Open Inference Protocol: BatchMaker's cells and DVABatch's stages, HTTP and gRPC."""

from __future__ import annotations

import asyncio
import io
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_batchmaker.models.store import save_model
from mlsys_batchmaker.serve.app import make_app
from mlsys_dvabatch.scheduling.policies.input import InputPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.serve.wire import EncoderWire
from mlsys_open_inference import GrpcConfig, create_oip_app, front, grpc_address_of
from mlsys_serving.http import BackgroundServer, HttpConfig
from mlsys_serving.http.record import make_logger
from mlsys_serving.models import ModelRepository
from mlsys_serving.tracing import TraceConfig

from tests.collector import Collector, collecting, facts_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TINY = BertConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, vocab_size=100, max_length=32)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def posted(url: str, bodies: list[Any]) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            return list(await asyncio.gather(*(client.post(url, json=body) for body in bodies)))

    responses = asyncio.run(ask())
    assert all(response.status_code == 200 for response in responses), responses[0].text
    return responses


def tensor(name: str, values: list[list[int]] | list[int]) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "INT64", "shape": list(np.shape(values)), "data": values}]}


def test_cells(collector: Collector, tmp_path: Path) -> None:
    save_model(lstm_model(num_words=6, hidden_size=8), tmp_path / "lstm")
    http, logger = HttpConfig(traces=TraceConfig(collector.url)), make_logger("json", stream=io.StringIO())
    app = make_app(
        [tmp_path], EngineConfig(compiler="eager", executor="cell"), extensions=front(), http=http, logger=logger
    )
    with BackgroundServer(app) as server:
        posted(f"{server.url}/v2/models/lstm/infer", [tensor("words", [1, 4, 2, 0] * 10)] * 4)
    roots = collector.wait("POST /v2/models/{model}/infer", 4)
    parts = [collector.below(root)["infer lstm"] for root in roots]
    runs = [facts_of(collector.below(part)["run"]) for part in parts]
    assert all(facts_of(part)["mlsys.finish_reason"] == "done" for part in parts)
    assert all(run["mlsys.batches"] >= 40 for run in runs)  # a cell is a task of its own
    assert max(run["mlsys.neighbours.max"] for run in runs) >= 1
    assert facts_of(roots[0])["mlsys.model"] == "lstm"


def test_grpc_and_parts_as_they_come(collector: Collector, tmp_path: Path) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    save_model(seq2seq_model(num_words=6, hidden_size=8, eos=None), tmp_path / "seq2seq")
    http, logger = HttpConfig(traces=TraceConfig(collector.url)), make_logger("json", stream=io.StringIO())
    app = make_app(
        [tmp_path], EngineConfig(compiler="eager"), extensions=front(grpc=GrpcConfig()), http=http, logger=logger
    )
    words = grpcclient.InferInput("words", [4], "INT64")
    words.set_data_from_numpy(np.array([1, 4, 2, 0]))
    with BackgroundServer(app):
        address = grpc_address_of(app)
        with grpcclient.InferenceServerClient(f"{address.host}:{address.port}") as client:
            client.infer("seq2seq", [words], headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
            parts: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: parts.put((result, error)))
            client.async_stream_infer("seq2seq", [words])
            client.stop_stream()  # waits for the answers
        assert not parts.empty()
        assert all(error is None for _, error in parts.queue)
    (call,) = collector.wait("inference.GRPCInferenceService/ModelInfer")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert set(collector.below(call)) == {"infer seq2seq"}
    (stream,) = collector.wait("inference.GRPCInferenceService/ModelStreamInfer")
    run = collector.below(collector.below(stream)["infer seq2seq"])["run"]
    assert [event.name for event in run.events].count("first output") == 1


def test_stages(collector: Collector) -> None:
    torch.manual_seed(0)
    model = BertStages(TINY, 2).eval()
    served = ServedModel(
        Loaded("tiny", model, EncoderWire(TINY)),
        parse_stages("1+1,1+1"),
        InputPolicy(),
        max_batch_size=8,
        num_threads=1,
    )
    http, logger = HttpConfig(traces=TraceConfig(collector.url)), make_logger("json", stream=io.StringIO())
    app = create_oip_app(ModelRepository([served]), config=http, logger=logger)
    with BackgroundServer(app) as server:
        posted(f"{server.url}/v2/models/tiny/infer", [tensor("input_ids", [[5, 6, 7]] * 3)])
    (root,) = collector.wait("POST /v2/models/{model}/infer")  # all are sent when the server has ended
    parts = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert len(parts) == 3  # a row is a request of its own
    runs = [facts_of(collector.below(part)["run"]) for part in parts]
    assert all(run["mlsys.batches"] >= 1 and run["mlsys.executor_s"] > 0 for run in runs)
    assert max(run["mlsys.neighbours.max"] for run in runs) >= 1
