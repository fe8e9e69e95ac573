"""Models of many families, one of six layers with servers over its parts, and the real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.installed import installed_model
from tests.orca.conftest import tiny_metadata, write_gguf
from tests.orca.parallel.places import write_checkpoint
from tests.orca.survival.clients import Server, name_of
from tests.processes import FAULT_S, abandoned, await_ends, by_age, end, until
from tests.warm import Warm

NUM_LAYERS, HIDDEN, VOCAB = 6, 128, 260


def six_layer_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a Llama that 1, 2 or 4 ranks and 1, 2, 3 or 6 stages divide."""
    generator = np.random.default_rng(seed)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN)}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.{layer}.{part}.weight": (HIDDEN, HIDDEN) for layer in range(NUM_LAYERS) for part in parts}
    tensors = {name: generator.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"blk.{layer}.{kind}_norm.weight" for layer in range(NUM_LAYERS) for kind in ("attn", "ffn")]
    return tensors | {
        name: generator.normal(1, 0.1, HIDDEN).astype(np.float32) for name in [*norms, "output_norm.weight"]
    }


def environment_here() -> dict[str, str]:
    """Return the environment for a process that imports the tests as this one does."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's small checkpoint, each written once."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in made:
            made[name] = write_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return path_of


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file."""
    return installed_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of that Llama."""
    changes = {
        "llama.block_count": NUM_LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count_kv": 4,
    }
    path = tmp_path_factory.mktemp("six") / "six.gguf"
    return write_gguf(path, tiny_metadata() | changes, six_layer_tensors())


@pytest.fixture(scope="session")
def start(six_layers: Path) -> Iterator[Callable[..., Any]]:
    """``with start(**options) as server``: see ``server.py``; nobody and no shared memory is left behind."""
    warm = Warm("tests.orca.parallel.server")

    @contextmanager
    def started(model: Path = six_layers, **options: Any) -> Iterator[Server]:
        before = set(Path("/dev/shm").iterdir())
        process = warm.start(str(model), json.dumps(options))
        children: list[psutil.Process] = []
        try:
            line = process.stdout.readline()
            assert line, "the server has ended"
            server = Server(process, int(line))
            if "gate" in options:
                yield server
                return
            until(lambda: httpx.get(f"{server.url}/health", timeout=None).status_code == 200)
            yield server
        finally:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
            end(process)
            process.stdout.close()
            assert not await_ends(children, timeout_s=FAULT_S)
        # Other programs of the machine make files, too, and map them a moment later.
        until(lambda: not abandoned(set(Path("/dev/shm").iterdir()) - before))

    yield started
    warm.close()


def ranks_of(holder: Any) -> list[psutil.Process]:
    """Return the ranks of all groups of a server, or of a node, by age."""
    found = psutil.Process(getattr(holder, "process", holder).pid).children(recursive=True)
    return sorted((each for each in found if name_of(each) == "mlsys-rank"), key=by_age)
