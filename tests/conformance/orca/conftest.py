"""The real model under transformers and under Orca, each loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel

from tests.installed import installed_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A team of threads waits for its slowest at each of many small operators: slow on a busy host."""
    with intra_op_threads(1):
        yield


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model's GGUF file."""
    return installed_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def greedy_by_transformers() -> Callable[..., list[list[int]]]:
    """:func:`reference_greedy`."""
    return reference_greedy


@pytest.fixture(scope="session")
def smollm2(model_path: Path) -> LoadedModel:
    """The real model under Orca, fp32."""
    return load_model(model_path, dtype="fp32")


@pytest.fixture(scope="session")
def reference_tokenizer(model_path: Path) -> Any:
    """Transformers' tokenizer with the file's vocabulary and template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.fixture(scope="session")
def reference_model(model_path: Path) -> Any:
    """The same checkpoint under transformers, fp32; from_pretrained would do these steps, but asks for accelerate."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(model_path.parent, gguf_file=model_path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(model_path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.eos_token_id)
    return model


def reference_greedy(model: Any, prompts: Sequence[list[int]], num_tokens: int, *, pad_id: int) -> list[list[int]]:
    """Greedy answers of ``transformers.generate``, prompts padded on the left, cut after the end token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    return [cut_after_end(row[width:].tolist(), {model.generation_config.eos_token_id}) for row in out]


def cut_after_end(tokens: list[int], ends: set[int | None]) -> list[int]:
    """``tokens`` up to the first end token, that one included."""
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in ends), tokens)
