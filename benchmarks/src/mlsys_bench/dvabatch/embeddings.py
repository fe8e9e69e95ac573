"""The suite ``dvabatch-embeddings``: texts to vectors as fast as they come, DVABatch beside libraries of embeddings.

Each contestant is a process with the same folder, texts and number of threads. Peers try three batch sizes first and
keep the best. Then all take turns, round after round, and their vectors are compared before any time is told. At last
texts come one by one, at half of the best peer's speed: the same arrivals to all.

    benchmarks/peers/install.sh embeddings
    mlsys bench dvabatch-embeddings
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.models import resolve_model
from mlsys_core.report import Section, Table
from mlsys_core.workload import Poisson
from numpy.typing import NDArray

from mlsys_bench.dvabatch.over_http import texts_like
from mlsys_bench.dvabatch.workloads import LIKE
from mlsys_bench.harness.child import environment

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext


OURS, INT8 = "DVABatch", "DVABatch, int8"
INT8_PEERS = ("onnxruntime, int8", "openvino, int8")
PEERS = ("sentence-transformers", "fastembed", "onnxruntime", "openvino", *INT8_PEERS)
ABSENT = {
    "infinity-emb": "asks for an older transformers than any other peer",
    "llama.cpp": "no wheel brings this encoder as GGUF",
    "text-embeddings-inference": "is no Python package",
}
BATCH_SIZES = (8, 32, 64)
LEAST_COSINE = 0.99999
_LEAST = {INT8: 0.99} | dict.fromkeys(INT8_PEERS, 0.9)  # cosines, where it is another
_PEERS_AT = Path("benchmarks/peers/embeddings")


@dataclass
class Contestant:
    """A process that turns texts into vectors.

    Args:
        name: Of the contestant.
        command: Starts it.
        env: Its environment.
    """

    name: str
    command: Sequence[str]
    env: dict[str, str] = field(repr=False)
    batch_size: int = 0  # of peers: the best of those tried

    @contextmanager
    def started(self) -> Iterator[Contestant]:
        """Start the process, wait until it is ready, and end it."""
        with subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=self.env,
        ) as child:  # fmt: skip
            self._child = child
            try:
                self._line()
                yield self
            finally:
                child.kill()

    def embed(self, texts: Sequence[str], *, batch_size: int | None = None) -> tuple[dict[str, float], NDArray[Any]]:
        """Return the seconds it took, by the clock and of the processor, and the vectors.

        Args:
            texts: At once.
            batch_size: Of peers; None: the best.

        Raises:
            MlsysError: The process has ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "vectors.npy"
            spent = self._ask(texts=list(texts), batch_size=batch_size or self.batch_size, out=str(out))
            return spent, np.load(out)

    def serve(self, texts: Sequence[str], arrivals: Sequence[float]) -> list[float]:
        """Return the seconds between each text's arrival and its vector.

        Args:
            texts: Each a request of its own.
            arrivals: Seconds from the begin, by text.

        Raises:
            MlsysError: The process has ended.
        """
        answer = self._ask(texts=list(texts), arrivals=list(arrivals), batch_size=self.batch_size)
        return [float(latency_s) for latency_s in answer["latencies"]]

    def tune(self, texts: Sequence[str]) -> None:
        """Try all batch sizes, after one run to warm up, and keep the fastest."""
        self.embed(texts[:16], batch_size=BATCH_SIZES[0])
        some = texts[: max(BATCH_SIZES)]
        spent = {size: self.embed(some, batch_size=size)[0]["seconds"] for size in BATCH_SIZES}
        self.batch_size = min(spent, key=spent.__getitem__)

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(asked) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise MlsysError(f"{self.name} has ended") from error
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise MlsysError(f"{self.name} has ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


def contestants(folder: Path, num_threads: int, peers: Path) -> tuple[list[Contestant], dict[str, str]]:
    """Return ours and the peers that are installed, and why the others are missing.

    Args:
        folder: Of the encoder.
        num_threads: Of each.
        peers: The environment of the peers.
    """
    variables = environment() | {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "true"}
    threads = str(num_threads)
    ours = [sys.executable, "-m", "mlsys_bench.dvabatch.embedding_child", str(folder), threads]
    found = [Contestant(OURS, ours, variables), Contestant(INT8, [*ours, "int8"], variables)]
    missing = dict(ABSENT)
    python = peers / "bin" / "python"
    plain = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    for name in PEERS:
        if python.exists():
            command = [str(python.absolute()), str(_PEERS_AT / "peer.py"), name, str(folder), threads]
            found.append(Contestant(name, command, plain))
        else:
            missing[name] = f"no environment at {peers}: benchmarks/peers/install.sh embeddings"
    return found, missing


def compare(name: str, vectors: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the least cosine between a contestant's vectors and the expected ones.

    Raises:
        MlsysError: It is below :data:`LEAST_COSINE`, or what int8 may have: no time is worth telling.
    """
    if vectors.shape != expected.shape:
        raise MlsysError(f"{name} gives vectors {list(vectors.shape)}, expected {list(expected.shape)}")
    least = float(cosines(vectors, expected).min())
    if not least > _LEAST.get(name, LEAST_COSINE):
        raise MlsysError(f"{name} gives other vectors: a cosine of {least:.6f}")
    return least


def run(
    context: BenchContext,
    *,
    lengths: tuple[str, ...] = (),
    texts: int = 512,
    rounds: int = 5,
    model: str = "all-minilm-l6-v2",
    peers: str = ".peers/embeddings",
) -> Section:
    """Run the suite.

    Args:
        context: Its context; quick has 64 texts and one round.
        lengths: Of the texts, names of :data:`LIKE`; none: RTE, SST-2 and long-tailed.
        texts: In each round.
        rounds: Of each.
        model: A name, or an encoder's folder.
        peers: The environment of the peers.

    Raises:
        InvalidInputError: There are no such lengths.
        MlsysError: A contestant gives other vectors.
    """
    lengths = lengths or ("RTE", "SST-2", "long-tailed")
    for name in lengths:
        if name not in LIKE:
            raise InvalidInputError(f"lengths={name}: give some of {','.join(LIKE)}, with commas")
    num, rounds = (64, 1) if context.is_quick else (texts, rounds)
    folder = Path(model) if Path(model).is_dir() else resolve_model(model, settings().cache_dir)
    entered, missing = contestants(folder, context.num_threads, Path(peers))
    data: dict[str, object] = {"missing": missing, "threads": context.num_threads, "texts": num}
    body: list[Any] = [f"{num} texts at once, {context.num_threads} threads each, {rounds} rounds in turn."]
    with ExitStack() as running:
        for each in entered:
            context.console.print(f"{each.name}: loading")
            running.enter_context(each.started())
        for workload in lengths:
            given = texts_like(workload, num)
            context.console.print(f"lengths like {workload}")
            figures = race(entered, given, rounds)
            data[workload] = figures
            body.append(_table(workload, figures))
    body.append("Missing: " + "; ".join(f"{name} ({why})" for name, why in missing.items()) + ".")
    return Section("DVABatch: embeddings", body, data=data)


def race(entered: Sequence[Contestant], texts: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Let all contestants embed the texts in turn; return each one's figures.

    Args:
        entered: Started; the first gives the vectors that the others are compared with.
        texts: In each round.
        rounds: Of each, after one in which peers find their batch size.

    Raises:
        MlsysError: One gives other vectors.
    """
    least, kept, expected = {}, {}, None
    for each in entered:
        if each.name in (OURS, INT8):
            each.embed(texts)
        else:
            each.tune(texts)
        _, vectors = each.embed(texts)
        expected = vectors if expected is None else expected
        least[each.name] = compare(each.name, vectors, expected)
        kept[each.name] = nearest_kept(vectors, expected)
    spent: dict[str, list[dict[str, float]]] = {each.name: [] for each in entered}
    for _ in range(rounds):
        for each in entered:
            spent[each.name].append(each.embed(texts)[0])
    per_s = {name: len(texts) / statistics.median(turn["seconds"] for turn in turns) for name, turns in spent.items()}
    in_floats = (speed for name, speed in per_s.items() if name not in (OURS, INT8, *INT8_PEERS))
    rate = max(in_floats, default=per_s[OURS]) / 2
    latencies: dict[str, list[float]] = {each.name: [] for each in entered}
    for number in range(rounds):
        arrivals = Poisson(rate).times(len(texts), np.random.default_rng(number))
        for each in entered:
            latencies[each.name] += each.serve(texts, [float(at) for at in arrivals])
    return {
        each.name: {
            "per_s": per_s[each.name],
            "processor_ms_a_text": statistics.median(turn["processor_s"] for turn in spent[each.name])
            * 1e3
            / len(texts),
            "least_cosine": least[each.name],
            "nearest_kept": kept[each.name],
            "batch_size": each.batch_size,
            "rate_per_s": rate,
            **{f"p{at}_ms": float(np.percentile(latencies[each.name], at)) * 1e3 for at in (50, 99)},
        }
        for each in entered
    }


def _table(workload: str, figures: dict[str, dict[str, float]]) -> Table:
    ours = figures[OURS]
    beside = {name: figures[INT8] if name in INT8_PEERS else ours for name in figures}
    rows = [
        [
            name,
            f"{row['per_s']:.1f}",
            f"{beside[name]['per_s'] / row['per_s']:.2f}x",
            f"{row['processor_ms_a_text']:.2f}",
            f"{beside[name]['processor_ms_a_text'] / row['processor_ms_a_text']:.2f}x",
            f"{row['p50_ms']:.0f}",
            f"{row['p99_ms']:.0f}",
            f"{row['least_cosine']:.7f}",
            f"{row['nearest_kept']:.1%}",
            f"{row['batch_size']:.0f}" if row["batch_size"] else "policy's",
        ]
        for name, row in figures.items()
    ]
    names = "per s,ours is,CPU ms/text,ours takes,p50 ms,p99 ms,least cosine,nearest 10 kept,batch"
    title = f"Texts of lengths like {workload}, int8 beside int8; latencies at {ours['rate_per_s']:.1f} texts/s"
    return Table(["", *names.split(",")], rows, title)


def nearest_kept(vectors: NDArray[Any], expected: NDArray[Any], most: int = 10) -> float:
    """Return how much of each text's nearest others stays: their common part of the nearest ``most``, on average.

    Args:
        vectors: Of a contestant, [texts, features].
        expected: Of the reference, in the same order.
        most: Texts that a search returns.
    """
    most, orders = min(most, len(vectors) - 1), []
    for each in (vectors, expected):
        unit = each / np.linalg.norm(each, axis=1, keepdims=True)
        alike = unit @ unit.T
        np.fill_diagonal(alike, -2)
        orders.append(np.argsort(-alike, axis=1, kind="stable")[:, :most])
    pairs = zip(*(each.tolist() for each in orders), strict=True)
    return float(np.mean([len(set(ours) & set(theirs)) / most for ours, theirs in pairs]))


def cosines(vectors: NDArray[Any], expected: NDArray[Any]) -> NDArray[Any]:
    """Return each vector's cosine to the expected one: two of [texts, features] -> [texts]."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    found: NDArray[Any] = (vectors * expected).sum(1) / lengths
    return found
