"""BentoML with the models of `mlsys bench core-oip-front`; a request's ``inputs`` are its list, so bodies are the same.

benchmarks/peers/install.sh bentoml
.peers/bentoml/bin/python benchmarks/peers/bentoml/server.py 18300
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import bentoml  # type: ignore[import-not-found]
import numpy as np


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 256}, logging={"access": {"enabled": False}})
class Double:
    """A model that doubles its input, in 2 ms a batch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @bentoml.api(route="/v2/models/unbatched/infer")  # type: ignore[untyped-decorator]
    def unbatched(self, inputs: list) -> list:  # type: ignore[type-arg]
        """Double one request's row."""
        with self._lock:
            return doubled(inputs)

    @bentoml.api(route="/v2/models/batched/infer", batchable=True, max_batch_size=16, max_latency_ms=60_000)  # type: ignore[untyped-decorator]
    def batched(self, inputs: list) -> list:  # type: ignore[type-arg]
        """Double the rows of several requests."""
        return doubled(inputs)


def doubled(inputs):  # type: ignore[no-untyped-def]
    """Return the protocol's JSON of each row."""
    time.sleep(0.002)
    rows = np.array([each["data"] for each in inputs], np.float32) * np.float32(2)
    return [{"name": "y", "datatype": "FP32", "shape": [1, len(row)], "data": row.tolist()} for row in rows]


def main() -> None:
    """Serve until SIGTERM."""
    os.environ["BENTOML_DO_NOT_TRACK"] = "1"
    os.chdir(Path(__file__).parent)
    command = ["serve", "server:Double", "--host", "127.0.0.1", "--port", sys.argv[1]]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])


if __name__ == "__main__":
    main()
