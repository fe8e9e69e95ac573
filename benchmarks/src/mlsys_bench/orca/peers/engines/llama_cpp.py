"""llama.cpp's own server, in the build that xllamacpp packages: over HTTP, or called from threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xllamacpp

from mlsys_bench.orca.peers.engines.http_front import read_words


def serve(options: dict[str, Any], port: int) -> None:
    """Serve on 127.0.0.1 until the process is ended; its HTTP is llama.cpp's."""
    server = _start(options, port)
    while server.listening_address:
        time.sleep(3600)


def _start(options: dict[str, Any], port: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = options["n_parallel"]
    params.n_ctx = options["n_parallel"] * options["max_model_len"]
    params.n_batch = max(2048, options["n_ubatch"])
    params.n_ubatch = options["n_ubatch"]
    params.kv_unified = options["kv_unified"]
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['kv_type'].upper()}")
    params.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{options['flash_attention'].upper()}"
    )
    params.cache_ram_mib = 0
    params.cache_prompt = False
    params.n_threads_http = options["n_parallel"] + 8
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["num_threads"]
    return xllamacpp.Server(params)


class PeerEngine:
    """The server's loop on the GGUF file ``model``.

    Settings: ``n_parallel`` (sequences at once), ``n_ubatch`` (tokens of an iteration), ``kv_type``, ``kv_unified`` and
    ``flash_attention``; ``body``: the sampling fields of every request.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._server = _start(options, port=0)
        self._body = options["body"]
        self._token_of = {word: token for token, word in read_words(Path(options["tokenizer"])).items()}
        self._events: queue.SimpleQueue[tuple[int, list[int]]] = queue.SimpleQueue()

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        body = {**self._body, "prompt": prompt, "max_tokens": num_tokens, "stream": True}

        def on_chunk(chunk: dict[str, Any]) -> None:
            text = chunk["choices"][0]["text"]  # each chunk is one token, each token one word
            if text:
                self._events.put((key, [self._token_of[text]]))

        threading.Thread(target=self._server.handle_completions, args=(body, on_chunk), daemon=True).start()

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            events.append(self._events.get())
        return events
