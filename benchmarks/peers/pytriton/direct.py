"""Triton without PyTriton's way around: the 2 ms models of server.py in its own python backend, its quickest form.

.peers/pytriton/bin/python benchmarks/peers/pytriton/direct.py 18000 18001 &
mlsys bench core-oip-front clients=8,64,256 peers=triton@127.0.0.1:18000@127.0.0.1:18001@$!
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tritonserver import serve

MODEL = """
import time

import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.002)
        given = [backend.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        doubled = np.concatenate(given) * np.float32(2)
        parts = np.split(doubled, np.cumsum([len(each) for each in given])[:-1])
        return [backend.InferenceResponse([backend.Tensor("y", part)]) for part in parts]
"""


def write(folder: Path, name: str, batching: str) -> None:
    """Write one model."""
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "1" / "model.py").write_text(MODEL)
    (folder / name / "config.pbtxt").write_text(
        f'name: "{name}"\nbackend: "python"\nmax_batch_size: 16\n'
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
        f"instance_group [ {{ count: 1 kind: KIND_CPU }} ]\n{batching}\n"
    )


if __name__ == "__main__":
    work = Path(tempfile.mkdtemp(prefix="triton-"))
    write(work / "models", "unbatched", "")  # without a batcher each execution has one request
    write(work / "models", "batched", "dynamic_batching { }")
    serve(work / "models", work, int(sys.argv[1]), int(sys.argv[2]), [])
