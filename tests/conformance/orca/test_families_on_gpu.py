"""Every family on a CUDA device against transformers on the CPU, and that rows keep their bits beside others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mlsys_orca import LLM
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor

from tests.conformance.orca.families import CASES, write_checkpoint
from tests.conformance.orca.test_families import PROMPTS

pytestmark = pytest.mark.gpu
Greedy = Callable[..., list[list[int]]]
BLOCK, NUM_TOKENS = 16, 24


def log_probabilities(loaded: LoadedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Return log-probabilities of each sequence's next tokens, all run as one ragged batch; on the CPU."""
    device = loaded.model.device
    cache = KVCache(
        loaded.config, num_blocks=8 * len(sequences), block_size=BLOCK, dtype=loaded.model.dtype, device=device
    )
    builder = BatchBuilder()
    for i, sequence in enumerate(sequences):
        table = tuple(range(8 * i, 8 * i + 8))
        builder.add(str(i), sequence, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
    with torch.inference_mode():
        rows = range(sum(map(len, sequences)))
        inputs = ForwardInputs(builder.build(), block_size=BLOCK, device=device, wanted=rows)
        logits = loaded.model(inputs, cache).float().log_softmax(-1).cpu()
    return list(torch.split(logits, [len(sequence) for sequence in sequences]))


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    reference = write_checkpoint(tmp_path, CASES[name])
    loaded = load_model(tmp_path, dtype="fp32", device="cuda")
    found = log_probabilities(loaded, PROMPTS)
    for prompt, ours in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
    print(name, type(loaded.model).__name__)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("policy", ["chunked", "orca"])
def test_answers_of_the_engine_are_those_of_transformers(
    name: str, policy: str, tmp_path: Path, greedy_by_transformers: Greedy
) -> None:
    reference = write_checkpoint(tmp_path, CASES[name])
    expected = greedy_by_transformers(reference, PROMPTS, NUM_TOKENS, pad_id=2)
    with LLM(tmp_path, device="cuda", dtype="fp32", policy=policy, max_model_len=96) as llm:
        answers = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert [list(answer.token_ids) for answer in answers] == expected
