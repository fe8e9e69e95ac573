"""Cost of each dtype of keys and values: memory of a token, and the change of a model's predictions.

A text is read in windows, each as one prompt in pieces of 64 tokens, so that every piece but the first reads what the
cache gives back. Every next token's distribution is compared with that over a cache in fp32: the mean negative
log-likelihood of the next token, the mean Kullback-Leibler divergence, and the share of equal likeliest tokens.

    mlsys bench orca-kv-dtypes model=smollm2-135m-instruct text=docs/orca.md window=1024
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.kv_cache import kv_nbytes_per_token
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor

from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.weights import TEXT, divergence, nll

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext
    from mlsys_core.report import Section

DTYPES = ("float32", "bfloat16", "float16", "int8")
PIECE = 64  # tokens of an iteration


@dataclass(frozen=True, slots=True)
class Row:
    """One dtype of keys and values."""

    kv_dtype: str
    kibibytes: float  # of a token, in all layers
    nll: float  # mean, nats a token
    nll_change: float  # relative to fp32's
    divergence: float  # mean, nats a token
    agreement: float  # share of tokens whose likeliest successor is fp32's


def log_probabilities(model: DecoderModel, token_ids: list[int], kv_dtype: str) -> Tensor:
    """Return the log-probabilities of every next token, fp32 [num_tokens, vocab_size], read piece by piece."""
    table = tuple(range(len(token_ids) // 16 + 1))
    cache = new_kv_cache(model, num_blocks=len(table), dtype=kv_dtype)
    found = []
    for first in range(0, len(token_ids), PIECE):
        builder, piece = BatchBuilder(), token_ids[first : first + PIECE]
        builder.add("text", piece, num_computed_tokens=first, block_table=table, sampling=SamplingParams())
        with torch.inference_mode():
            inputs = ForwardInputs(builder.build(), block_size=16, device="cpu", wanted=range(len(piece)))
            found.append(model(inputs, cache).log_softmax(-1).clone())
    return torch.cat(found)


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    text: str = "",
    window: int = 1024,
    windows: int = 4,
    dtype: str = "fp32",
    kv_dtypes: tuple[str, ...] = DTYPES,
) -> Section:
    """Measure each dtype.

    Args:
        context: The suite's context; quick has one window of 128 tokens.
        model: A name or a path; it must run in native kernels.
        text: A file to read; empty: four paragraphs of our own.
        window: Tokens of a window.
        windows: At most so many.
        dtype: Of the model.
        kv_dtypes: Of keys and values; the first is what the others are compared with.
    """
    if context.is_quick:
        window, windows = 128, 1
    loaded = load_model(resolve_model(model, settings().cache_dir), dtype=dtype, backend="native")
    decoder = loaded.model.with_threads(context.num_threads)  # type: ignore[attr-defined]  # it is native
    ids = loaded.tokenizer.encode(Path(text).read_text() if text else TEXT)
    parts = [ids[first : first + window] for first in range(0, len(ids), window)][:windows]
    found: dict[str, list[tuple[float, ...]]] = {}
    for part in parts:
        exact = log_probabilities(decoder, part, kv_dtypes[0])
        for kv_dtype in kv_dtypes:
            own = exact if kv_dtype == kv_dtypes[0] else log_probabilities(decoder, part, kv_dtype)
            agreement = (own.argmax(-1) == exact.argmax(-1)).float().mean().item()
            found.setdefault(kv_dtype, []).append((nll(own, part), divergence(own, exact), agreement))
    rows, expected = [], 0.0
    for kv_dtype, each in found.items():
        means = [
            statistics.fmean(values, weights=[len(part) - 1 for part in parts]) for values in zip(*each, strict=True)
        ]
        expected = expected or means[0]
        size = kv_nbytes_per_token(loaded.config, getattr(torch, kv_dtype)) / 1024
        rows.append(Row(kv_dtype, size, means[0], means[0] / expected - 1, *means[1:]))
    num_tokens = sum(map(len, parts))
    return rows_section("Orca: dtypes of keys and values", rows, model=model, dtype=dtype, num_tokens=num_tokens)
