"""Every family of the table by the command, as it serves by default: supervised, in processes that share its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_orca.model.families import ARCHITECTURES

from tests.conformance.orca import test_t5 as encoder_decoders
from tests.conformance.orca.families import CASES, write_checkpoint
from tests.conformance.orca.test_families import PROMPTS as FIRST_PROMPTS
from tests.orca.survival.commands import served
from tests.warm import Warm
from tests.warm_mlsys import place

PROMPTS, NUM_TOKENS = FIRST_PROMPTS[:4], 8
NAMES = {  # the family of a case, where its name does not begin as an architecture's
    "qwen3-next": "qwen3_next",
    "qwen3-5": "qwen3_5_text",
    "qwen3-5-moe": "qwen3_5_moe_text",
    "qwen3-moe": "qwen3_moe",
    "qwen2-moe": "qwen2_moe",
    "gemma3": "gemma3_text",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
    "granite-hybrid": "granitemoehybrid",
    "mistral-window": "mistral",
}
# The first case of each family; T5's have a file of their own.
FAMILY_OF = {name: ARCHITECTURES.get(NAMES.get(name, name)) for name in reversed(CASES)}
SERVED = {family: name for name, family in FAMILY_OF.items()}


@pytest.fixture(scope="module")
def mlsys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command, without the seconds of importing."""
    warm = Warm("tests.warm_mlsys", "torch", "fastapi", "uvicorn", "tokenizers", "mlsys_orca.api.server")
    yield [str(place(warm, tmp_path_factory.mktemp("commands")) / "mlsys"), "orca"]
    warm.close()


@pytest.mark.some_cases(18)
@pytest.mark.parametrize("family", sorted(set(ARCHITECTURES.values())), ids=lambda name: name.partition("families.")[2])
def test_a_family_is_served(
    family: str, mlsys: list[str], tmp_path: Path, greedy_by_transformers: Callable[..., list[list[int]]]
) -> None:
    if family == ARCHITECTURES["t5"]:
        reference: Any = encoder_decoders.write_checkpoint(tmp_path, "t5")
        with torch.inference_mode():
            options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
            expected = [reference.generate(torch.tensor([prompt]), **options)[0, 1:].tolist() for prompt in PROMPTS]
    else:
        reference = write_checkpoint(tmp_path, CASES[SERVED[family]])
        expected = greedy_by_transformers(reference, PROMPTS, NUM_TOKENS, pad_id=2)
    decode = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode

    with served(str(tmp_path), "--dtype", "fp32", command=mlsys) as server:
        sampling = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = server.post("/v1/completions", model=tmp_path.name, prompt=PROMPTS, **sampling)

    assert answer.status_code == 200, answer.text
    assert [choice["text"].split() for choice in answer.json()["choices"]] == [decode(ids).split() for ids in expected]
