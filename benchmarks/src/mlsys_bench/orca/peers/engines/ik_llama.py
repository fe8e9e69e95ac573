"""ik_llama.cpp's library in the build that ik-llama-cpp-python packages, which has no server: its batches, filled here.

Every step takes the last token of each running sequence and the whole prompts of those that fit beside: iteration-level
batching, as in llama.cpp's server. Weights are repacked while loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as api


class PeerEngine:
    """The library on the GGUF file ``model``.

    Settings: ``n_parallel`` (sequences at once), ``n_ubatch`` (tokens that are computed together), ``repack``, and
    ``flash_attention``, which in this build ends the process where a batch has several sequences.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        api.llama_backend_init()
        weights = api.llama_model_default_params()
        weights.repack_tensors = options["repack"]
        weights.use_mmap = not options["repack"]
        weights.n_gpu_layers = 0
        model = api.llama_model_load_from_file(options["model"].encode(), weights)
        params = api.llama_context_default_params()
        params.n_seq_max = options["n_parallel"]
        params.n_ctx = options["n_parallel"] * options["max_model_len"]
        params.n_batch = self._most = max(2048, options["n_ubatch"])
        params.n_ubatch = options["n_ubatch"]
        params.n_threads = params.n_threads_batch = options["num_threads"]
        params.flash_attn = options["flash_attention"]
        self._context = model and api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp does not load {options['model']}")
        self._num_tokens = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(self._most, 0, 1)
        self._free = list(range(options["n_parallel"]))
        self._waiting: list[tuple[int, list[int], int]] = []
        self._running: dict[int, list[int]] = {}  # by key: sequence, position, last token, tokens to come

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        self._waiting.append((key, prompt, num_tokens))

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        del timeout_s  # a step is one iteration
        self._batch.n_tokens = 0
        ends = {}  # by key: index of its last token in the batch
        for key, (sequence, position, last, _) in self._running.items():
            ends[key] = self._put([last], sequence, position)
            self._running[key][1] += 1
        while self._waiting and self._free and self._batch.n_tokens + len(self._waiting[0][1]) <= self._most:
            key, prompt, num_tokens = self._waiting.pop(0)
            sequence = self._free.pop()
            ends[key] = self._put(prompt, sequence, 0)
            self._running[key] = [sequence, len(prompt), 0, num_tokens]
        if not ends:
            return []
        if status := api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"ik_llama.cpp's llama_decode returned {status}")
        events = []
        for key, at in ends.items():
            logits = api.llama_get_logits_ith(self._context, at)
            token = int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax())
            state = self._running[key]
            state[2], state[3] = token, state[3] - 1
            events.append((key, [token]))
            if not state[3]:
                api._lib.llama_kv_cache_seq_rm(api.ctypes.c_void_p(self._context), state[0], -1, -1)
                self._free.append(state[0])
                del self._running[key]
        return events

    def _put(self, tokens: Sequence[int], sequence: int, position: int) -> int:
        """Append tokens to the batch; return the index of the last, which alone has logits."""
        batch = self._batch
        for i, token in enumerate(tokens):
            at = batch.n_tokens
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + i, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, i == len(tokens) - 1
            batch.n_tokens = at + 1
        return int(batch.n_tokens) - 1
