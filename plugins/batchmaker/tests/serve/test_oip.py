"""A served model as ``tritonclient`` meets it, over HTTP and gRPC."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mlsys_batchmaker.engine import Engine, EngineConfig
from mlsys_batchmaker.models.sequence import lstm_model, seq2seq_model
from mlsys_batchmaker.models.store import save_model
from mlsys_batchmaker.serve.app import make_app
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference import GrpcConfig, front, grpc_address_of
from mlsys_serving.http import BackgroundServer
from mlsys_serving.http.record import make_logger

httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")
WORDS = np.array([1, 4, 2, 0], dtype=np.int64)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    root: Path = tmp_path_factory.mktemp("models")
    save_model(lstm_model(num_words=6, hidden_size=8), root / "lstm")
    save_model(seq2seq_model(num_words=6, hidden_size=8, eos=None), root / "seq2seq")
    (root / "lstm" / "config.pbtxt").write_text(
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 600000000 } }"
    )
    app = make_app(
        [root],
        EngineConfig(compiler="eager"),
        extensions=front(grpc=GrpcConfig(), model_control=True),
        logger=make_logger("json", stream=io.StringIO()),
    )
    with BackgroundServer(app) as server:
        address = grpc_address_of(app)
        yield server.url.removeprefix("http://"), f"{address.host}:{address.port}"


def tensor(module, words: np.ndarray):
    given = module.InferInput("words", list(words.shape), "INT64")
    given.set_data_from_numpy(words)
    return given


def test_http(served):
    expected_model = lstm_model(num_words=6, hidden_size=8)
    with Engine(expected_model, EngineConfig(compiler="eager")) as engine:
        expected = engine.submit({"words": WORDS}).result().outputs["hidden"]
    with httpclient.InferenceServerClient(served[0]) as client:
        assert client.is_model_ready("lstm")
        levels = '{"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1}}'
        with pytest.raises(httpclient.InferenceServerException, match="priority_levels"):
            client.load_model("lstm", config=levels)
        result = client.infer("lstm", [tensor(httpclient, WORDS)])
        np.testing.assert_allclose(result.as_numpy("hidden"), expected, rtol=0, atol=1e-6)
        with pytest.raises(httpclient.InferenceServerException, match=r"\[0, 6\)"):
            client.infer("lstm", [tensor(httpclient, np.array([9], dtype=np.int64))])
        stats = client.get_inference_statistics("lstm")["model_stats"][0]
        assert int(stats["inference_stats"]["success"]["count"]) >= 1
    text = urllib.request.urlopen(f"http://{served[0]}/metrics").read().decode()
    assert 'mlsys_batchmaker_cells_total{model="lstm",version="1"}' in text
    assert 'nv_inference_request_success{model="lstm"' in text


def test_grpc_and_streaming(served):
    import queue

    with grpcclient.InferenceServerClient(served[1]) as client:
        whole = client.infer("seq2seq", [tensor(grpcclient, WORDS)]).as_numpy("words").tolist()
        assert len(whole) == len(WORDS) + 10
        parts: queue.Queue[object] = queue.Queue()
        client.start_stream(lambda result, error: parts.put(error or result))
        client.async_stream_infer("seq2seq", [tensor(grpcclient, WORDS)], enable_empty_final_response=True)
        words: list[int] = []
        while True:
            part = parts.get(timeout=600)
            assert not isinstance(part, Exception), part
            if part.get_response().parameters["triton_final_response"].bool_param:
                break
            words += part.as_numpy("words").tolist()
        client.stop_stream()
    assert words == whole


def test_models_are_unloaded_and_loaded(served):
    with httpclient.InferenceServerClient(served[0]) as client:
        client.unload_model("lstm")
        assert not client.is_model_ready("lstm")
        client.load_model("lstm")
        assert client.infer("lstm", [tensor(httpclient, WORDS)]).as_numpy("hidden").shape == (8,)


def test_a_folder_without_models_is_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match=r"there is no model in .*mlsys batchmaker save"):
        make_app([tmp_path], EngineConfig(), extensions=front())
