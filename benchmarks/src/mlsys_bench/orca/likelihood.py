"""The suite ``orca-likelihood``: a text's likelihood by rows in whole numbers, by float rows, and by llama.cpp.

    benchmarks/peers/install.sh llama-cpp
    mlsys bench orca-likelihood --threads 2

The model is SmolLM2-135M with rows filled up to multiples of 256 (:mod:`.padded`), which llama.cpp's quantiser brings
into each type; the text is our records of decisions, in windows of 512 tokens, each read as one prompt. Both programs
get the same tokens of the same file.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.models import resolve_model
from mlsys_orca.backends.native.decoder import to_native
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.loading.load import DTYPES, default_dtype, load_model

from mlsys_bench.harness.child import environment
from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca import llama_likelihood
from mlsys_bench.orca.padded import Quantiser, library_of, write
from mlsys_bench.orca.peers.models import PEERS
from mlsys_bench.orca.weights import log_probabilities

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

KINDS = ("q4_0", "q8_0", "q4_k_m", "q5_k", "q6_k")
WINDOW = 512
_ROOT = Path(__file__).parents[4]


@dataclass(frozen=True, slots=True)
class Row:
    """One file; means over all tokens but each window's first, in nats a token."""

    file: str
    int8: float  # rows of whole numbers
    float_rows: float
    llama_cpp: float
    int8_change: float  # over llama.cpp's, relative
    standard_error: float  # of that change: of the mean of the tokens' differences
    float_change: float  # float rows over llama.cpp's, relative


def default_text() -> str:
    """Return our records of decisions, one after another."""
    return "\n\n".join(path.read_text() for path in sorted((_ROOT / "docs" / "adr").glob("00*.md")))


def windows_of(token_ids: Sequence[int], count: int) -> list[list[int]]:
    """Return the first ``count`` windows of :data:`WINDOW` tokens.

    Raises:
        InvalidInputError: the text has fewer tokens.
    """
    if len(token_ids) < count * WINDOW:
        raise InvalidInputError(f"the text has {len(token_ids)} tokens; {count} windows of {WINDOW} were asked for")
    return [list(token_ids[i * WINDOW : (i + 1) * WINDOW]) for i in range(count)]


def ours(path: Path, windows: Sequence[list[int]], *, dtype: str, activations: Rows) -> list[float]:
    """Return the negative log-likelihood of each token after a window's first."""
    loaded = load_model(path, dtype=dtype, backend="torch", weights="packed")
    model, found = to_native(loaded.model, backend="native", activations=activations), []
    for window in windows:
        rows = log_probabilities(model, window)[:-1]
        found += (-rows.gather(1, torch.tensor(window[1:])[:, None])[:, 0]).tolist()
    return found


def by_llama(path: Path, windows: Sequence[list[int]], *, vocab_size: int, peers: Path, threads: int) -> list[float]:
    """Return the same by llama.cpp, in a process of its own."""
    command = [sys.executable, "-m", llama_likelihood.__name__, str(library_of(peers)), str(path), str(threads)]
    given = json.dumps({"windows": windows, "vocab_size": vocab_size})
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise InvalidInputError(f"llama.cpp: {done.stderr[-500:]}")
    return [value for window in json.loads(done.stdout) for value in window]


def row_of(name: str, int8: Sequence[float], floats: Sequence[float], llama: Sequence[float]) -> Row:
    """Return the means of one file and their relative changes.

    Example:
        >>> row_of("a", [1.0, 3.0], [1.0, 1.0], [1.0, 1.0]).int8_change
        1.0
    """
    expected = statistics.mean(llama)
    differences = [a - b for a, b in zip(int8, llama, strict=True)]
    error = statistics.stdev(differences) / sqrt(len(differences)) / expected
    means = statistics.mean(int8), statistics.mean(floats)
    return Row(name, *means, expected, means[0] / expected - 1, error, means[1] / expected - 1)


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    text: str = "",
    kinds: tuple[str, ...] = KINDS,
    windows: int = 16,
    dtype: str = "",
    peers: Path = PEERS,
) -> Section:
    """Compare likelihoods.

    Args:
        context: The suite's context.
        model: A name or a GGUF file, a Llama whose embedding is its head.
        text: A file to read; empty: our records of decisions.
        kinds: Types of file: :data:`KINDS`.
        windows: Windows of 512 tokens.
        dtype: Ours; empty: this machine's default.
        peers: Folder of the peers' environments.
    """
    source = resolve_model(model, settings().cache_dir)
    dtype, quantiser, rows = dtype or default_dtype(), Quantiser(peers), []
    windows, kinds = (2, kinds[:1]) if context.is_quick else (windows, kinds)
    context.output_dir.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        path = context.output_dir / f"wide-{kind}.gguf"
        write(source, kind, path, quantiser)
        loaded = load_model(path, backend="torch", weights="packed")
        taken = windows_of(loaded.tokenizer.encode(Path(text).read_text() if text else default_text()), windows)
        vocab_size = loaded.config.vocab_size
        del loaded
        llama = by_llama(path, taken, vocab_size=vocab_size, peers=peers, threads=context.num_threads)
        forms = {form: ours(path, taken, dtype=dtype, activations=form) for form in ("int8", "float")}
        rows.append(row_of(kind, forms["int8"], forms["float"], llama))
        path.unlink()
    note = f"{windows} windows of {WINDOW} tokens; ours under {DTYPES[dtype]}"
    return rows_section("Orca and llama.cpp: likelihood of a text", rows, note, model=model)
