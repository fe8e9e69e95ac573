r"""Real Triton, through PyTriton, with the encoder twice: dynamic batching without delay, and with a tuned one.

    LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu \
        PYTHONPATH=packages/core/src:packages/serving/src:plugins/dvabatch/src:plugins/encoders/src \
        .peers/pytriton/bin/python benchmarks/peers/pytriton/encoder.py 18300 FOLDER DELAY_MS

See `mlsys bench dvabatch-over-http`. A batch of texts is tokenised and padded in the model, as Triton joins only
requests of one shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from pytriton.decorators import batch  # type: ignore[import-not-found]
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor  # type: ignore[import-not-found]
from pytriton.triton import Triton, TritonConfig  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).parents[1]))

from sentence_model import embedder


def main(port: int, folder: Path, delay_ms: float) -> None:
    """Serve until SIGTERM."""
    embed = embedder(folder)

    @batch
    def infer(text):  # type: ignore[no-untyped-def]
        return [embed([value.decode() for value in np.char.encode(text[:, 0].astype(np.str_), "utf-8")])]

    config = TritonConfig(
        http_port=port,
        grpc_port=port + 1,
        metrics_port=port + 2,
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        allow_gpu_metrics=False,
    )
    with Triton(config=config) as triton:
        for name, window_ms in (("all-minilm-l6-v2", 0.0), ("all-minilm-l6-v2-delay", delay_ms)):
            batcher = DynamicBatcher(max_queue_delay_microseconds=int(window_ms * 1e3))
            triton.bind(
                name,
                infer,
                inputs=[Tensor(name="text", dtype=np.bytes_, shape=(1,))],
                outputs=[Tensor(name="embedding", dtype=np.float32, shape=(-1,))],
                config=ModelConfig(max_batch_size=64, batcher=batcher),
            )
        triton.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
