"""vLLM's engine in this process, driven step by step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vLLM is imported

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine


class PeerEngine:
    """The engine on the directory ``model``.

    Settings: ``max_num_seqs``, ``max_num_batched_tokens`` and ``eager``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options["model"],
                dtype=options["dtype"],
                max_model_len=options["max_model_len"],
                max_num_seqs=options["max_num_seqs"],
                max_num_batched_tokens=options["max_num_batched_tokens"],
                enforce_eager=options["eager"],
                enable_prefix_caching=False,
                seed=0,
            )
        )

    def add(self, key: int, prompt: list[int], num_tokens: int) -> None:
        """See :meth:`http_front.Engine.add`."""
        sampling = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(str(key), {"prompt_token_ids": prompt}, sampling)

    def step(self, timeout_s: float) -> Sequence[tuple[int, Sequence[int]]]:
        """See :meth:`http_front.Engine.step`."""
        return [(int(answer.request_id), list(answer.outputs[0].token_ids)) for answer in self._engine.step()]
