"""Company of a timed call: busy processes, other libraries' pools in the process, several callers."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mlsys_bench.harness.machine import busy_processes

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Company:
    """Other users of the cores while calls are timed."""

    name: str
    busy_per_core: int = 0  # processes on each core that compute all the time, at equal priority
    has_pools: bool = False  # each timed call follows one of torch, ONNX Runtime and OpenVINO, whose threads still spin
    num_callers: int = 1  # threads that call at once


NUM_CALLERS = 4
COMPANIES = (
    Company("alone"),
    Company("one busy process a core", busy_per_core=1),
    Company("two busy processes a core", busy_per_core=2),
    Company("other pools", has_pools=True),
    Company("four callers", num_callers=NUM_CALLERS),
)


@contextmanager
def keep(company: Company, stir: Call) -> Iterator[Call | None]:
    """Provide the company within the context; yield the call to make before each timed one, or None.

    Args:
        company: The company.
        stir: Wakes the other pools.
    """
    with busy_processes(company.busy_per_core):
        if company.busy_per_core:
            time.sleep(0.2)  # until the interpreters have started
        yield stir if company.has_pools else None


def call_together(call: Call, num_callers: int, seconds: float) -> list[float]:
    """Call from several threads at once for a while; return the seconds of every call.

    Example:
        >>> len(call_together(lambda: None, 4, 0.0))
        4
    """
    ready, samples = threading.Barrier(num_callers), [list[float]() for _ in range(num_callers)]

    def work(own: list[float]) -> None:
        with torch.no_grad():
            call()
            ready.wait()
            end = time.perf_counter() + seconds
            while not own or time.perf_counter() < end:
                begin = time.perf_counter()
                call()
                own.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=work, args=(own,)) for own in samples]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sample for own in samples for sample in own]


def other_pools(num_threads: int) -> tuple[Call, list[str]]:
    """Return a call that puts all other libraries' pools to work for about a millisecond, and the libraries' names.

    They are set as they come: their threads spin for a while after a call.
    """
    x = torch.randn(512, 512)
    calls: list[Call] = [lambda: x @ x]
    names = ["torch"]
    for name, make in (("ONNX Runtime", _onnx_runtime), ("OpenVINO", _openvino)):
        try:
            calls.append(make(_product(), num_threads))
        except ModuleNotFoundError:
            continue
        names.append(name)

    def stir() -> None:
        for call in calls:
            call()

    return stir, names


def _product() -> bytes:
    """Return an ONNX model that multiplies a matrix by itself."""
    onnx = importlib.import_module("onnx")
    helper, shape = onnx.helper, [512, 512]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "product", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made: bytes = model.SerializeToString()
    return made


def _onnx_runtime(model: bytes, num_threads: int) -> Call:
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {"x": torch.randn(512, 512).numpy()}
    return lambda: session.run(None, feeds)


def _openvino(model: bytes, num_threads: int) -> Call:
    core = importlib.import_module("openvino").Core()
    compiled = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_NUM_THREADS": num_threads})
    request, x = compiled.create_infer_request(), torch.randn(512, 512).numpy()
    return lambda: request.infer({0: x})
