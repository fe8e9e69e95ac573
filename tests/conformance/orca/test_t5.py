"""T5 and its kin against transformers: small random checkpoints, the same tokens under every policy, in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_core.plugins import installed_plugins
from mlsys_core.serving import SimulatedExecutor, simulate
from mlsys_orca.batch import SampledToken, SamplingParams
from mlsys_orca.block_tables import BlockTables
from mlsys_orca.kv_cache import KVCache
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.models.encoder_decoder import EncoderDecoder
from mlsys_orca.runner import Runner
from mlsys_orca.schedulers.policy import make_scheduler
from mlsys_orca.schedulers.request import GenerationRequest
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, NEW, BLOCK, START = 256, 64, 4, 0
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 112,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
    "decoder_start_token_id": START,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "flan": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "orca": ("orca", {}),
    "paged": ("paged", {}),
    "chunked": ("chunked", {"max_batch_tokens": 45}),
    "request-level": ("request-level", {}),
}


def write_checkpoint(path: Path, name: str) -> Any:
    """A directory as transformers saves one; those with a head of their own have it in the file, as Flan-T5 does."""
    import transformers

    family, changes = CASES[name]
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms are ones otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif parameter_name == "shared.weight":
                parameter.mul_(0.6)
            else:  # with T5's own small numbers the tied head says the last token again and again
                parameter.copy_(torch.randn_like(parameter)).mul_(_deviation(parameter_name))
    model.save_pretrained(path)
    if name == "flan":
        tensors = load_file(path / "model.safetensors")
        head = torch.randn(VOCAB, SHAPE["d_model"]) * 0.2
        save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()  # type: ignore[no-untyped-call]
        assert torch.equal(model.lm_head.weight, head)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    return model


def _deviation(name: str) -> float:
    if "relative" in name:
        return 1.0
    return 0.1 if name.endswith((".q.weight", ".k.weight")) else 0.3


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    path = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(path, request.param)
    return load_model(path, dtype="fp32"), reference


def expected_answers(reference: Any) -> list[list[int]]:
    """Greedy, by ``transformers.generate``, all prompts in one padded batch; it does not stop at an end token."""
    longest = max(LENGTHS)
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in LENGTHS])
    with torch.inference_mode():
        out = reference.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, num_beams=1, eos_token_id=None
        )
    return out[:, 1:].tolist()


def serve(loaded: LoadedModel, name: str, *, num_blocks: int) -> tuple[dict[str, tuple[SampledToken, ...]], Any]:
    """Serve all prompts, arriving one after the other, two batches in flight; all blocks are free in the end."""
    policy, options = POLICIES[name]
    tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK)
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=7,
        max_model_len=128,
        options=options,
    )
    trace = [
        (
            2.5 * number,
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=(*prompt, START),
                max_new_tokens=NEW,
                sampling=SamplingParams(num_logprobs=0),
                num_encoder_tokens=len(prompt),
            ),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    cache = KVCache(loaded.config, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32)
    executor = SimulatedExecutor(lambda _: 1.0, Runner(loaded.model, cache).run, max_in_flight=2)
    simulation = simulate(scheduler, executor, trace)
    assert tables.num_free_blocks == num_blocks
    return {served.request_id: served.finished.result.tokens for served in simulation.requests}, scheduler


def log_probabilities(reference: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Of each token of ``answer``."""
    with torch.inference_mode():
        inputs = torch.tensor([[START, *answer[:-1]]])
        logits = reference(input_ids=torch.tensor([prompt]), decoder_input_ids=inputs).logits[0]
    assert logits.std() > 0.5  # distinct enough for greedy choices to mean something
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("checkpoint", "policy"),
    [("flan", policy) for policy in POLICIES]
    + [("t5", "paged"), ("t5", "request-level"), ("mt5", "orca"), ("umt5", "orca")],
    indirect=["checkpoint"],
)
def test_answers_are_those_of_transformers(checkpoint: tuple[LoadedModel, Any], policy: str) -> None:
    """Under the policies that preempt, 45 blocks do not hold two of the longest requests."""
    loaded, reference = checkpoint
    assert isinstance(loaded.model, EncoderDecoder)
    expected = expected_answers(reference)
    assert len({tuple(answer) for answer in expected}) > 12, "prompts matter"
    assert max(len(set(answer)) for answer in expected) > 8, "and what was said before"
    preempts = policy in ("paged", "chunked")
    found, scheduler = serve(loaded, policy, num_blocks=45 if preempts else 120)
    assert [[token.token_id for token in found[str(number)]] for number in range(len(PROMPTS))] == expected
    assert (scheduler.book.num_preemptions > 5) == preempts
    assert scheduler.book.num_cached_tokens == 0
    for number, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
        ours = torch.tensor([token.logprob for token in found[str(number)]])
        assert torch.allclose(ours, log_probabilities(reference, prompt, answer), atol=1e-4, rtol=0)
