"""OpenVINO GenAI's continuous batching pipeline, driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai


class PeerEngine:
    """The pipeline on the IR directory ``model``.

    Settings: ``max_num_seqs``, ``max_num_batched_tokens``, ``precision`` and ``kv_precision`` (OpenVINO's names).
    """

    def __init__(self, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": options["precision"],
            "KV_CACHE_PRECISION": options["kv_precision"],
            "INFERENCE_NUM_THREADS": options["num_threads"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.asarray([prompt], dtype=np.int64))
        self._handles[key] = self._pipeline.add_request(key, ids, config)

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        self._pipeline.step()
        events = []
        for key, handle in list(self._handles.items()):
            while handle.can_read():
                events += [(key, output.generated_ids) for output in handle.read().values()]
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[key]
        return events
