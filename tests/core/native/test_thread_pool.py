"""The thread pool of the kernels, as a program of its own; `make sanitize` runs the same under the thread sanitiser."""

import multiprocessing
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.memory.pages import PAGE_NBYTES, advise_huge_pages
from mlsys_core.native import INCLUDE
from mlsys_core.native.compiler import find_compiler

SOURCE = Path(__file__).with_name("thread_pool_check.cpp")


def test_all_loops_are_right_whoever_arrives(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    program = tmp_path / "check"
    compiler.compile(SOURCE, program, ["-std=c++17", "-O2", "-pthread", f"-I{INCLUDE}"])
    finished = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert finished.stdout == "right sums\n"


def _predict_in_child(queue: "multiprocessing.Queue[float]") -> None:
    queue.put(_predict())


def _predict() -> float:
    torch = pytest.importorskip("torch")
    lightgbm = pytest.importorskip("lightgbm")
    windtunnel = pytest.importorskip("mlsys_windtunnel")
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 5))
    model = lightgbm.LGBMRegressor(n_estimators=60, n_jobs=1, verbose=-1).fit(x, x[:, 0])
    return float(np.abs(windtunnel.translate(model).predict(x) - model.predict(x)).max())


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    assert _predict() < 1e-9
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_predict_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=120) < 1e-9
    child.join(timeout=60)
    assert child.exitcode == 0


def test_huge_pages_are_asked_for_within_the_range_alone() -> None:
    memory = np.zeros(3 * PAGE_NBYTES, np.uint8)
    advise_huge_pages(memory.ctypes.data, memory.nbytes)
    advise_huge_pages(memory.ctypes.data, 10)  # less than a page: nothing
    memory[:] = 7
    assert (memory == 7).all()
