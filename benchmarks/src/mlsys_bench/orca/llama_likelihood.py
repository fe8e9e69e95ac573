"""Likelihood of a text by llama.cpp, through the C interface of the library in xllamacpp's wheel: a program of its own.

    python -m mlsys_bench.orca.llama_likelihood LIBRARY MODEL.gguf THREADS < windows.json > negative_logs.json

``windows.json``: lists of token ids. Each is read as one prompt; out come, for each list, the negative logarithms of
the probability of every token after the first. Structures that the library passes by value are opaque here but for
their first fields, whose defaults are checked.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CONTEXT = 512  # the default of the library, which is what a window may have


class _Opaque(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * 1024),)  # more than any of its structures


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def negative_logs(logits: NDArray[np.float32], targets: list[int]) -> list[float]:
    """Return the negative log-likelihood of each target: ``logits`` [len(targets), vocab_size].

    Example:
        >>> negative_logs(np.zeros((1, 4), np.float32), [2])[0] == float(np.log(4.0))
        True
    """
    wide = logits.astype(np.float64)
    top = wide.max(-1)
    sums = top + np.log(np.exp(wide - top[:, None]).sum(-1))
    return [float(total - row[target]) for total, row, target in zip(sums, wide, targets, strict=True)]


def _context(library: Any, model: str, threads: int) -> Any:
    for name, result in (
        ("llama_model_default_params", _Opaque),
        ("llama_context_default_params", _Opaque),
        ("llama_batch_init", _Batch),
        ("llama_model_load_from_file", ctypes.c_void_p),
        ("llama_init_from_model", ctypes.c_void_p),
        ("llama_get_memory", ctypes.c_void_p),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float)),
    ):
        getattr(library, name).restype = result
    library.llama_backend_init()
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Opaque]
    loaded = library.llama_model_load_from_file(model.encode(), library.llama_model_default_params())
    if not loaded:
        raise SystemExit(f"llama.cpp does not load {model}")
    params = library.llama_context_default_params()
    fields = np.frombuffer(
        params.bytes, np.int32
    )  # n_ctx, n_batch, n_ubatch, n_seq_max, ..., n_threads, n_threads_batch
    pairs = [i for i in range(3, 9) if fields[i] == fields[i + 1] and 1 < fields[i] < 512]
    if fields[0] != _CONTEXT or fields[3] != 1 or len(pairs) != 1:
        raise SystemExit(f"llama.cpp's context begins with other fields than known: {fields[:10].tolist()}")
    fields[pairs[0] : pairs[0] + 2] = threads
    library.llama_init_from_model.argtypes = [ctypes.c_void_p, _Opaque]
    context = library.llama_init_from_model(loaded, params)
    if not context:
        raise SystemExit("llama.cpp makes no context")
    return ctypes.c_void_p(context)


def main() -> None:
    """Read windows, write likelihoods."""
    _, path, model, threads = sys.argv
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the library goes to stderr
    library = ctypes.CDLL(path)
    context = _context(library, model, int(threads))
    batch = library.llama_batch_init(_CONTEXT, 0, 1)
    library.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    found = []
    windows, vocab_size = (content := json.load(sys.stdin))["windows"], content["vocab_size"]
    for window in windows:
        library.llama_memory_clear(ctypes.c_void_p(library.llama_get_memory(context)), True)
        batch.n_tokens = len(window)
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        if library.llama_decode(context, batch):
            raise SystemExit("llama.cpp does not decode a window")
        rows = [library.llama_get_logits_ith(context, i) for i in range(len(window) - 1)]
        logits = np.stack([np.ctypeslib.as_array(row, (vocab_size,)) for row in rows])
        found.append(negative_logs(logits, window[1:]))
    json.dump(found, answers)
    answers.close()
    os._exit(0)  # the library's threads need not be awaited


if __name__ == "__main__":
    main()
