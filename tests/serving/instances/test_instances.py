"""Instances as real processes: workers are killed and crash under load, and each request is told once."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from mlsys_open_inference.grpc.schema import SERVICE, messages
from mlsys_serving.instances.chaos import counted, workers_of
from mlsys_serving.processes import can_supervise

from tests.processes import await_ends, until

pytestmark = pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise()))
SERVER = Path(__file__).with_name("instances_server.py")
POISON, BROKEN = -1.0, -2.0
_PATIENCE_S = 600


class Server:
    """A running server and its client."""

    def __init__(self, process: subprocess.Popen[str], url: str, grpc_port: str) -> None:
        self.process, self.handle = process, psutil.Process(process.pid)
        self.grpc_port = grpc_port
        self.client = httpx.Client(base_url=url, timeout=_PATIENCE_S)

    def infer(
        self,
        x: list[float],
        *,
        model: str = "first",
        seconds: float | None = None,
        gate: Path | None = None,
        **parameters: object,
    ) -> httpx.Response:
        """Send a request, and return its response."""
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [len(x)], "data": x},
            {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["ab"]},
        ]
        if seconds is not None:
            inputs.append({"name": "seconds", "datatype": "FP32", "shape": [1], "data": [seconds]})
        if gate is not None:
            inputs.append({"name": "gate", "datatype": "BYTES", "shape": [1], "data": [str(gate)]})
        return self.client.post(f"/v2/models/{model}/infer", json={"inputs": inputs, "parameters": parameters})

    def stream(self, x: list[float], gate: Path) -> Iterator[float]:
        """Yield the numbers of the first model's stream, over gRPC."""
        request = messages().ModelInferRequest(model_name="first")
        request.inputs.add(name="x", datatype="FP32", shape=[len(x)]).contents.fp32_contents.extend(x)
        for name, text in (("text", b"ab"), ("gate", str(gate).encode())):
            request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call = channel.stream_stream(
                f"/{SERVICE}/ModelStreamInfer",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=messages().ModelStreamInferResponse.FromString,
            )
            for part in call(iter([request]), timeout=_PATIENCE_S):
                assert not part.error_message
                yield struct.unpack("<f", part.infer_response.raw_output_contents[0])[0]

    def await_pending(self, number: int) -> None:
        """Wait until so many requests to the first model are under way."""
        line = f'nv_inference_pending_request_count{{model="first",version="1"}} {number}'
        until(lambda: line in self.client.get("/metrics").text)

    def pid(self, model: str) -> int:
        """Return the process that answers for a model."""
        return outputs(self.infer([1.0], model=model))["pid"][0]


def outputs(response: httpx.Response) -> dict[str, list]:
    """Return the outputs of an answer by name."""
    assert response.status_code == 200, response.text
    return {each["name"]: each["data"] for each in response.json()["outputs"]}


@contextmanager
def running(num_instances: int) -> Iterator[Server]:
    """Run a server; it has no memory with a name, and at the end nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(num_instances)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    server = Server(process, *process.stdout.readline().split())
    processes = [server.handle, *server.handle.children(recursive=True)]
    assert not any("/dev/shm/" in Path(f"/proc/{each.pid}/maps").read_text() for each in processes)
    try:
        yield server
        processes += server.handle.children(recursive=True) if server.handle.is_running() else []
    finally:
        server.client.close()
        if process.poll() is None:
            process.terminate()
        process.wait(_PATIENCE_S)
        process.stdout.close()
    assert not await_ends(processes, timeout_s=_PATIENCE_S)


def test_killed_workers_lose_nothing_and_each_answer_is_told_once():
    num_clients, num_each = 6, 30
    answered = threading.Semaphore(0)
    with running(2) as server, ThreadPoolExecutor(num_clients) as clients:

        def client(number: int) -> list[tuple[list[float], dict[str, list]]]:
            found = []
            for index in range(num_each):
                x = [1.0 + 1000 * number + index] * (1 if index % 3 else 6000)  # in the frame, or in shared memory
                found.append((x, outputs(server.infer(x, seconds=0.005))))
                answered.release()
            return found

        futures = [clients.submit(client, number) for number in range(num_clients)]
        for _ in range(4):  # a death after each twenty answers
            for _ in range(20):
                assert answered.acquire(timeout=_PATIENCE_S)
            with suppress(psutil.NoSuchProcess):  # one that was killed before has just been fetched
                max(workers_of(server.handle), key=lambda worker: worker.cpu_times().user).kill()
        for future in futures:
            for x, found in future.result():
                assert found["x"] == [2 * value for value in x]
                assert found["text"] == ["abab"]
        line = f'nv_inference_request_success{{model="first",version="1"}} {num_clients * num_each}.0'
        until(lambda: line in server.client.get("/metrics").text)


def test_a_crash_ends_one_model_and_fails_the_request_that_caused_it():
    with running(1) as server, ThreadPoolExecutor(4) as clients:
        first, second = server.pid("first"), server.pid("second")
        neighbours = [clients.submit(server.infer, [float(number)], seconds=0.05) for number in range(3)]
        poison = server.infer([POISON], seconds=0.02)
        assert (poison.status_code, "also when it runs alone" in poison.text) == (500, True)
        assert [outputs(each.result())["x"] for each in neighbours] == [[0.0], [2.0], [4.0]]
        assert (server.pid("first") == first, server.pid("second") == second) == (False, True)
        broken = server.infer([BROKEN])
        assert (broken.status_code, "secret" in broken.text) == (500, False)


def test_what_must_not_run_again_gets_an_error_and_a_stream_goes_on(tmp_path: Path):
    with running(1) as server, ThreadPoolExecutor(3) as clients:
        pid = server.pid("first")
        gate = tmp_path / "killed"
        once = clients.submit(server.infer, [1.0], gate=tmp_path / "never", repeatable=False)
        again = clients.submit(server.infer, [5.0], gate=gate)
        server.await_pending(2)
        parts = []
        for part in server.stream([1.0, 2.0, 3.0, 4.0], gate):
            parts.append(part)
            if len(parts) == 2:
                os.kill(pid, signal.SIGKILL)
                gate.touch()
        assert parts == [2.0, 4.0, 6.0, 8.0]
        died = once.result()
        assert (died.status_code, "must not run again" in died.text) == (500, True)
        assert outputs(again.result())["x"] == [10.0]
        assert server.infer([1.0], repeatable="no").status_code == 400
        metrics = server.client.get("/metrics").text
        assert counted(metrics, "mlsys_inference_repeated", "first") == 2  # the stream, and the one before it


def test_a_signal_to_all_processes_lets_running_requests_end(tmp_path: Path):
    with running(1) as server, ThreadPoolExecutor(1) as clients:
        slow = clients.submit(server.infer, [1.0], gate=tmp_path / "gate")
        server.await_pending(1)
        os.killpg(server.process.pid, signal.SIGINT)
        until(lambda: server.client.get("/v2/health/ready").status_code != 200)
        assert not slow.done()
        (tmp_path / "gate").touch()
        assert outputs(slow.result())["x"] == [2.0]
        assert server.process.wait(_PATIENCE_S) == 0


def test_the_death_of_the_parent_ends_all():
    with running(1) as server:
        server.pid("second")
        server.process.kill()
