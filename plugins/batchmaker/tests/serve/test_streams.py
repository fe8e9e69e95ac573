"""Sequences as ``tritonclient`` sends them, over HTTP (JSON and binary), gRPC and gRPC streams."""

from __future__ import annotations

import io
import queue
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_batchmaker.engine import EngineConfig
from mlsys_batchmaker.models.silero import FRAME, frames_of
from mlsys_batchmaker.models.store import holds_stream, load_stream, save_stream
from mlsys_batchmaker.serve.app import make_app
from mlsys_batchmaker.streams.engine import StreamEngine
from mlsys_bench.batchmaker.voice import speech_like
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_core.models import resolve_model
from mlsys_open_inference import GrpcConfig, front, grpc_address_of
from mlsys_serving.http import BackgroundServer
from mlsys_serving.http.record import make_logger

httpclient = pytest.importorskip("tritonclient.http")
grpcclient = pytest.importorskip("tritonclient.grpc")
try:
    resolve_model("silero-vad", settings().cache_dir)
    is_missing = False
except MissingDependencyError:
    is_missing = True
pytestmark = [pytest.mark.model, pytest.mark.skipif(is_missing, reason="the wheel silero-vad is not installed")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[np.ndarray], list[np.ndarray]]]:
    root: Path = tmp_path_factory.mktemp("models")
    save_stream("silero-vad", root / "silero-vad")
    assert holds_stream(root / "silero-vad")
    voices = [frames_of(speech_like(2.0, seed=seed)) for seed in range(4)]
    with StreamEngine(load_stream(root / "silero-vad")) as engine:
        alone = [engine.run(voice) for voice in voices]
    app = make_app(
        [root],
        EngineConfig(num_workers=2),
        extensions=front(grpc=GrpcConfig()),
        logger=make_logger("json", stream=io.StringIO()),
    )
    with BackgroundServer(app) as server:
        address = grpc_address_of(app)
        yield server.url.removeprefix("http://"), f"{address.host}:{address.port}", voices, alone


def samples(module: Any, frames: np.ndarray, *, binary: bool = True) -> Any:
    flat = frames.reshape(-1)
    given = module.InferInput("samples", [len(flat)], "FP32")
    given.set_data_from_numpy(flat, **({} if module is grpcclient else {"binary_data": binary}))
    return [given]


@pytest.mark.parametrize(("wire", "binary"), [("http", True), ("http", False), ("grpc", True)])
def test_sequences_are_equal_to_the_stream_alone(served: Any, wire: str, binary: bool) -> None:
    http, grpc, voices, alone = served
    module, url = (httpclient, http) if wire == "http" else (grpcclient, grpc)
    found: list[list[float]] = [[] for _ in voices]
    with module.InferenceServerClient(url) as client:
        for at in range(0, 60, 3):
            for number, voice in enumerate(voices):
                answer = client.infer(
                    "silero-vad",
                    samples(module, voice[at : at + 3], binary=binary),
                    sequence_id=number + 7 if number % 2 else f"caller-{number}",
                    sequence_start=at == 0,
                    sequence_end=at == 57,
                )
                found[number] += answer.as_numpy("speech").tolist()
    for number in range(len(voices)):
        np.testing.assert_array_equal(np.float32(found[number]), alone[number][:60])


def test_frames_of_a_grpc_stream_are_answered_in_order(served: Any) -> None:
    _, grpc, voices, alone = served
    parts: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc) as client:
        client.start_stream(lambda result, error: parts.put(error or result))
        for number, frame in enumerate(voices[0]):  # none waits for an answer
            client.async_stream_infer(
                "silero-vad",
                samples(grpcclient, frame),
                request_id=str(number),
                sequence_id=99,
                sequence_start=number == 0,
                sequence_end=number == len(voices[0]) - 1,
            )
        found = [parts.get(timeout=600) for _ in voices[0]]
        client.stop_stream()
    assert [each.get_response().id for each in found] == [str(number) for number in range(len(found))]
    np.testing.assert_array_equal(np.concatenate([each.as_numpy("speech") for each in found]), alone[0])


def test_a_recording_without_a_sequence_is_a_stream_of_its_own(served: Any) -> None:
    http, _, voices, alone = served
    long = np.tile(voices[0], (6, 1))  # more frames than may wait
    with httpclient.InferenceServerClient(http) as client:
        answer = client.infer("silero-vad", samples(httpclient, voices[1])).as_numpy("speech")
        np.testing.assert_array_equal(answer, alone[1])
        assert client.infer("silero-vad", samples(httpclient, long)).as_numpy("speech").shape == (len(long),)
    text = urllib.request.urlopen(f"http://{http}/metrics").read().decode()
    assert 'mlsys_batchmaker_streams{model="silero-vad",version="1"} 0.0' in text
    assert 'mlsys_batchmaker_stream_frames_total{model="silero-vad"' in text


def test_a_start_begins_anew_and_what_is_wrong_is_refused(served: Any) -> None:
    http, _, voices, alone = served
    with httpclient.InferenceServerClient(http) as client:

        def ask(frames: np.ndarray, **options: Any) -> np.ndarray:
            answer: np.ndarray = client.infer("silero-vad", samples(httpclient, frames), **options).as_numpy("speech")
            return answer

        for _ in range(2):
            np.testing.assert_array_equal(ask(voices[2][:5], sequence_id=5, sequence_start=True), alone[2][:5])
        np.testing.assert_array_equal(ask(voices[2][5:9], sequence_id=5), alone[2][5:9])
        assert ask(voices[2][:0], sequence_id=5, sequence_end=True).shape == (0,)
        with pytest.raises(httpclient.InferenceServerException, match=r"sequence 5 .* is not open"):
            ask(voices[2][:1], sequence_id=5)
        with pytest.raises(httpclient.InferenceServerException, match="multiple of 512"):
            ask(np.zeros(FRAME + 1, dtype=np.float32))
        with pytest.raises(httpclient.InferenceServerException, match="NaN"):
            ask(np.full(FRAME, np.nan, dtype=np.float32))


def test_other_folders_hold_no_stream(tmp_path: Path) -> None:
    assert not holds_stream(tmp_path)
    with pytest.raises(InvalidInputError, match="holds no stream"):
        load_stream(tmp_path)
    with pytest.raises(InvalidInputError, match="no stream 'x'"):
        save_stream("x", tmp_path)
