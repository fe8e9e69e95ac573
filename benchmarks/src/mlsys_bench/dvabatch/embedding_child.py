"""Our side of ``dvabatch-embeddings``: the encoder behind DVABatch's engine, texts on stdin, vectors to files.

    python -m mlsys_bench.dvabatch.embedding_child FOLDER THREADS [WEIGHTS]

The protocol is that of ``benchmarks/peers/embeddings/peer.py``; the batch size is the policy's own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from mlsys_core.config import settings
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.serve.preparing import prepare
from mlsys_dvabatch.stages.zoo import Loading
from mlsys_encoders.serve.text_service import Cutting, TextEncoder
from numpy.typing import NDArray


class Embedder:
    """The encoder of a folder, packed, with a policy's batches.

    Args:
        folder: Of the encoder.
        threads: Cores to use.
        weights: As of ``mlsys dvabatch serve --weights``.
    """

    def __init__(self, folder: str, threads: int, weights: str = "float") -> None:
        torch.set_num_threads(threads)
        prepared = prepare(folder, settings().cache_dir, loading=Loading(weights=weights))
        self._served = ServedModel(prepared.loaded, prepared.costs, prepared.policy, num_threads=threads)
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()  # asyncio.Runner formats the result, to set its handler of Ctrl-C

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, [texts, features]."""
        encoder = TextEncoder(self._served, self._served.threads, str(next(self._numbers)))
        vectors, _ = self._loop.run_until_complete(encoder.vectors(texts, cutting=Cutting(is_cut=True)))
        return vectors

    def served(self, texts: Sequence[str], arrivals: Sequence[float]) -> list[float]:
        """Return the seconds between each text's arrival and its vector.

        Args:
            texts: Each a request of its own.
            arrivals: Seconds from now, by text.
        """
        began_s = time.perf_counter()

        async def one(text: str, at_s: float) -> float:
            await asyncio.sleep(at_s - (time.perf_counter() - began_s))
            await self._served.run_rows([self._served.wire.payload(text)], str(next(self._numbers)))
            return time.perf_counter() - began_s - at_s

        async def all_of_them() -> list[float]:
            return await asyncio.gather(*(one(text, at_s) for text, at_s in zip(texts, arrivals, strict=True)))

        return self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        """End the engine."""
        self._loop.run_until_complete(self._served.close())
        self._loop.close()


def main() -> None:
    """Answer line by line."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed otherwise is no answer
    embed = Embedder(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
    print(json.dumps({"is_ready": True}), file=said, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "arrivals" in asked:
            print(json.dumps({"latencies": embed.served(asked["texts"], asked["arrivals"])}), file=said, flush=True)
            continue
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        vectors = embed(asked["texts"])
        spent = {"seconds": time.perf_counter() - began_s, "processor_s": time.process_time() - began_cpu_s}
        np.save(asked["out"], vectors)
        print(json.dumps(spent), file=said, flush=True)
    embed.close()


if __name__ == "__main__":
    main()
