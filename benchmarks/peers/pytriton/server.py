"""Real Triton, through PyTriton, with models equal to the reference models of ``plugins/open-inference/tests``.

    python -m venv .peers/pytriton
    .peers/pytriton/bin/pip install -r benchmarks/peers/pytriton/requirements.txt
    .peers/pytriton/bin/python benchmarks/peers/pytriton/server.py 18000 18001

Then, in the project's environment:

    python tests/conformance/oip/probes.py --http 127.0.0.1:18000 --grpc 127.0.0.1:18001 --server triton
    mlsys bench core-oip-front peers=triton@127.0.0.1:18000@127.0.0.1:18001@PID
"""

from __future__ import annotations

import sys
import time

import numpy as np
from pytriton.decorators import batch  # type: ignore[import-not-found]
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor  # type: ignore[import-not-found]
from pytriton.triton import Triton, TritonConfig  # type: ignore[import-not-found]

DTYPES = {
    "bool": np.bool_,
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").type for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "bytes": np.bytes_,
}


@batch
def add(a, b=None):  # type: ignore[no-untyped-def]
    """Add elementwise."""
    return [a if b is None else a + b]


@batch
def upper(text_input):  # type: ignore[no-untyped-def]
    """Convert texts to capitals."""
    texts = np.char.upper(np.char.decode(text_input.astype(np.bytes_), "utf-8"))
    return [np.char.encode(texts, "utf-8")]


@batch
def double(x):  # type: ignore[no-untyped-def]
    """Double x, in 2 ms."""
    time.sleep(0.002)
    return [x * np.float32(2)]


def echo(requests):  # type: ignore[no-untyped-def]
    """Return each input unchanged."""
    answers = []
    for request in requests:
        answer = {f"{name}_out": np.zeros((1, 1), dtype) for name, dtype in DTYPES.items()}
        answers.append(answer | {f"{name}_out": request[name] for name in request})
    return answers


def repeat(requests):  # type: ignore[no-untyped-def]
    """Yield the text word by word."""
    [request] = requests
    for index, word in enumerate(request["text"][0].split()):
        yield [{"word": np.array([word]), "index": np.array([index], np.int32)}]


def main(http_port: int, grpc_port: int) -> None:
    """Serve until SIGTERM."""
    config = TritonConfig(
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=grpc_port + 1,
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        allow_gpu_metrics=False,
    )
    row = (-1,)
    batched = ModelConfig(max_batch_size=8, batcher=DynamicBatcher())
    with Triton(config=config) as triton:
        triton.bind(
            "add",
            add,
            inputs=[
                Tensor(name="a", dtype=np.float32, shape=row),
                Tensor(name="b", dtype=np.float32, shape=row, optional=True),
            ],
            outputs=[Tensor(name="sum", dtype=np.float32, shape=row)],
            config=batched,
        )
        triton.bind(
            "upper",
            upper,
            inputs=[Tensor(name="text_input", dtype=np.bytes_, shape=(1,))],
            outputs=[Tensor(name="text_output", dtype=np.bytes_, shape=(1,))],
            config=ModelConfig(max_batch_size=4, batcher=DynamicBatcher()),
        )
        triton.bind(
            "echo",
            echo,
            inputs=[Tensor(name=name, dtype=dtype, shape=(-1, -1), optional=True) for name, dtype in DTYPES.items()],
            outputs=[Tensor(name=f"{name}_out", dtype=dtype, shape=(-1, -1)) for name, dtype in DTYPES.items()],
            config=ModelConfig(batching=False),
        )
        triton.bind(
            "repeat",
            repeat,
            inputs=[Tensor(name="text", dtype=np.bytes_, shape=(1,))],
            outputs=[
                Tensor(name="word", dtype=np.bytes_, shape=(1,)),
                Tensor(name="index", dtype=np.int32, shape=(1,)),
            ],
            config=ModelConfig(batching=False, decoupled=True),
        )
        for name, max_batch_size in (("unbatched", 1), ("batched", 16)):
            triton.bind(
                name,
                double,
                inputs=[Tensor(name="x", dtype=np.float32, shape=(4,))],
                outputs=[Tensor(name="y", dtype=np.float32, shape=(4,))],
                config=ModelConfig(max_batch_size=max_batch_size, batcher=DynamicBatcher()),
            )
        triton.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
