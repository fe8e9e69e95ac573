"""Ray Serve with the models of `mlsys bench core-oip-front`, or the encoder, on the JSON form of the inference route.

    python -m venv .peers/ray-serve
    .peers/ray-serve/bin/pip install -r benchmarks/peers/ray-serve/requirements.txt
    .peers/ray-serve/bin/python benchmarks/peers/ray-serve/server.py 18200
    mlsys bench core-oip-front peers=ray@127.0.0.1:18200@-@PID

With ``--encoder FOLDER [WAIT_MS]``: see `mlsys bench dvabatch-over-http`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import ray  # type: ignore[import-not-found]
from ray import serve
from starlette.requests import Request

PEERS = str(Path(__file__).parents[1])


def answer(row):  # type: ignore[no-untyped-def]
    """Return the protocol's JSON of one row."""
    return {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, len(row)], "data": row.tolist()}]}


@serve.deployment(max_ongoing_requests=256)
class Double:
    """A model that doubles its input, in 2 ms a batch."""

    def __init__(self, size):  # type: ignore[no-untyped-def]
        self.run.set_max_batch_size(size)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.0)
    async def run(self, rows):  # type: ignore[no-untyped-def]
        """Double all rows at once."""
        await asyncio.sleep(0.002)
        return list(np.stack(rows) * np.float32(2))

    async def __call__(self, request: Request):  # type: ignore[no-untyped-def]
        """Answer one request."""
        body = await request.json()
        return answer(await self.run(np.array(body["inputs"][0]["data"], np.float32)))


@serve.deployment(max_ongoing_requests=256)
class Encoder:
    """Sentences to vectors."""

    def __init__(self, folder, wait_s):  # type: ignore[no-untyped-def]
        sys.path.insert(0, PEERS)
        from sentence_model import embedder

        self.embed = embedder(Path(folder))
        self.run.set_batch_wait_timeout_s(wait_s)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
    async def run(self, texts):  # type: ignore[no-untyped-def]
        """Encode all texts at once, beside the event loop."""
        return list(await asyncio.to_thread(self.embed, texts))

    async def __call__(self, request: Request):  # type: ignore[no-untyped-def]
        """Answer one request."""
        body = await request.json()
        return answer(await self.run(body["inputs"][0]["data"][0]))


def main() -> None:
    """Serve until SIGTERM."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # as the other servers; Ray's own default is 15
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"log_level": "ERROR"})
    if "--encoder" in sys.argv:
        wait_s = float(sys.argv[4]) / 1e3 if len(sys.argv) > 4 else 0.0
        route = "/v2/models/all-minilm-l6-v2/infer"
        serve.run(Encoder.bind(sys.argv[3], wait_s), name="encoder", route_prefix=route)
    else:
        for name, size in (("unbatched", 1), ("batched", 16)):
            serve.run(Double.bind(size), name=name, route_prefix=f"/v2/models/{name}/infer")
    print("ready", flush=True)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
