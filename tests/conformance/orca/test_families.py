"""Every family against transformers: small random checkpoints, served with preemption, in every form.

One served run a case: pages so few that requests are preempted, prefixes that are shared, chunks that end within
prompts.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SamplingParams

from tests.conformance.orca import served
from tests.conformance.orca.families import (
    CASES,
    GGUF,
    GPT_OSS,
    LONGROPE,
    SHAPE,
    SMALL,
    VOCAB,
    Case,
    log_probabilities,
    round_weights,
    write_checkpoint,
)
from tests.conformance.orca.served import Served
from tests.conformance.orca.to_gguf import convert_to_gguf

Greedy = Callable[..., list[list[int]]]

NUM_TOKENS, NUM_BLOCKS = 24, 14
SHARED = [(5 * i + 2) % VOCAB for i in range(32)]  # two whole blocks that three prompts begin with
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate([1, 20, 33, 5, 2, 40])]
PROMPTS += [[*SHARED, 3], [*SHARED, 5, 6, 7], SHARED]
GUESSED = ("gpt-oss", "deepseek-v2", "deepseek-v3", "qwen3-moe-of-all")  # attentions, choices of experts
QUANTISED = (  # one of each shape
    *("qwen2", "qwen3-biases", "gpt2", "phi3", "mixtral", "gemma2", "qwen3-moe"),
    *("qwen2-moe", "gemma", "granite", "cohere", "glm4"),
)


@dataclass(frozen=True)
class Checkpoint:
    """A directory, its model in transformers, and ours."""

    name: str
    path: Path
    reference: Any
    native: LoadedModel


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(path, CASES[request.param])
    native = load_model(path, dtype="fp32")
    native.tokenizer.eos_ids = frozenset()  # the reference does not stop either
    return Checkpoint(request.param, path, reference, native)


def tolerance_of(checkpoint: Checkpoint) -> float:
    """Of log-probabilities: transformers' own two forms of the delta rule differ by 4e-4 in a token of these."""
    return 1e-3 if checkpoint.name.startswith(("qwen3-next", "qwen3-5")) else 1e-4


@torch.inference_mode()
def logits_of(reference: Any, sequences: list[list[int]]) -> torch.Tensor:
    return torch.cat([reference(torch.tensor([sequence])).logits[0] for sequence in sequences])


def serve(model: Any, policy: str, **options: Any) -> Served:
    """Serve all prompts over few blocks."""
    sizes = {"num_tokens": NUM_TOKENS, "num_blocks": NUM_BLOCKS}
    if model.config.recurrent is not None:
        sizes["num_states"] = 8
    return served.serve(model, policy, PROMPTS, **sizes, **options)


def test_served_answers_are_those_of_transformers(checkpoint: Checkpoint, greedy_by_transformers: Greedy) -> None:
    assert isinstance(checkpoint.native.model, NativeDecoder)
    expected = greedy_by_transformers(checkpoint.reference, PROMPTS, NUM_TOKENS, pad_id=2)
    run = serve(checkpoint.native.model, "chunked", max_batch_tokens=24)
    assert run.token_ids == expected
    assert run.pool.num_preemptions > 0
    assert (run.pool.num_cached_tokens > 0) is (checkpoint.native.config.recurrent is None)  # states are not shared

    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    logits = logits_of(checkpoint.reference, sequences)
    assert logits.std() > 0.3  # distinct enough for greedy choices to mean something
    together = log_probabilities(checkpoint.native, sequences)
    assert torch.allclose(torch.cat(together), logits.log_softmax(-1), atol=tolerance_of(checkpoint), rtol=0)
    for sequence, ours in zip(sequences, together, strict=True):
        assert torch.equal(log_probabilities(checkpoint.native, [sequence])[0], ours)  # neighbours change no bit


@pytest.mark.some_cases(38)
def test_torchs_operators_and_bf16_give_nearly_the_same(checkpoint: Checkpoint) -> None:
    exact = logits_of(checkpoint.reference, PROMPTS).log_softmax(-1)
    torchs = torch.cat(log_probabilities(load_model(checkpoint.path, dtype="fp32", backend="torch"), PROMPTS))
    assert torch.allclose(torchs, exact, atol=tolerance_of(checkpoint), rtol=0)
    for backend in ("native", "torch"):
        rounded = torch.cat(log_probabilities(load_model(checkpoint.path, dtype="bf16", backend=backend), PROMPTS))
        assert torch.corrcoef(torch.stack((exact.flatten(), rounded.flatten())))[0, 1] > 0.98


@pytest.mark.parametrize("checkpoint", GUESSED, indirect=True, scope="module")
def test_guesses_change_no_answer(checkpoint: Checkpoint) -> None:
    model = checkpoint.native.model

    def prepare(pool: Any) -> None:
        pool.num_draft_tokens = 3

    for sampling in ({"sampling": SamplingParams()}, {"sampling": SamplingParams(temperature=0.5, seed=3)}):
        expected = serve(model, "paged", request=lambda _, given=sampling: given).token_ids
        guessed = serve(model, "paged", prepare=prepare, request=lambda _, given=sampling: given)
        assert guessed.token_ids == expected


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "orca": ("orca", {}),
    "paged": ("paged", {}),
    "paged, not shared": ("paged", {"prefix_caching": False}),
    "chunked": ("chunked", {"max_batch_tokens": 9}),
    "request-level": ("request-level", {}),
    "request-level, kinder": ("request-level", {"lockstep": False}),
}


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("num_blocks", [18, 200])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_answers_of_transformers(
    checkpoint: Checkpoint, greedy_by_transformers: Greedy, policy: str, num_blocks: int, backend: str
) -> None:
    """Two batches in flight; 18 small blocks do not hold two of the longer requests. One goes on with an answer."""
    first = greedy_by_transformers(checkpoint.reference, PROMPTS[-3:-2], NUM_TOKENS, pad_id=2)[0]
    prompts = [*PROMPTS, [*PROMPTS[-3], *first[:9], 77], PROMPTS[-2], PROMPTS[0], SHARED]
    expected = greedy_by_transformers(checkpoint.reference, prompts, NUM_TOKENS, pad_id=2)
    model = load_model(checkpoint.path, dtype="fp32", backend=backend).model
    name, options = POLICIES[policy]
    sizes = {"num_blocks": num_blocks, "block_size": 4}
    if backend == "native":  # whose blocks have 16 slots
        sizes = {"num_blocks": 6 if num_blocks == 18 else 50}
    run = served.serve(
        model, name, prompts, num_tokens=NUM_TOKENS, max_batch_size=5, every_s=1.5, max_in_flight=2, **sizes, **options
    )
    assert run.token_ids == expected
    if name in ("paged", "chunked"):
        is_shared = "not shared" not in policy
        assert (run.pool.num_preemptions > (5 if backend == "torch" else 0)) == (num_blocks == 18)
        assert (run.pool.num_cached_tokens > 50) == is_shared
        assert (run.num_copies > 0) == is_shared


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True, scope="module")
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("policy", ["paged", "chunked"])
def test_a_preempted_request_samples_its_own_tokens(checkpoint: Checkpoint, policy: str, backend: str) -> None:
    """Against the same requests one by one, none preempted or sharing: tokens equal, log-probabilities to 1e-4."""
    model = load_model(checkpoint.path, dtype="fp32", backend=backend).model
    prompts = [*PROMPTS, SHARED] * 2
    size = 16 if backend == "native" else 4

    def request(number: int) -> dict[str, Any]:
        return {"sampling": SamplingParams(temperature=0.8, seed=number, num_logprobs=2)}

    def run(policy: str, num_blocks: int, batch_size: int) -> served.Served:
        sizes = {"num_blocks": num_blocks, "block_size": size, "max_batch_size": batch_size}
        return served.serve(model, policy, prompts, num_tokens=NUM_TOKENS, every_s=0.0, request=request, **sizes)

    alone, crowded = run("orca", 40, 1), run(policy, 5 if backend == "native" else 18, 8)
    assert crowded.pool.num_preemptions > 5
    assert crowded.token_ids == alone.token_ids
    for expected, answer in zip(alone.answers, crowded.answers, strict=True):
        assert [token.logprob for token in answer] == pytest.approx([token.logprob for token in expected], abs=1e-4)


@pytest.mark.parametrize("checkpoint", GGUF, indirect=True, scope="module")
def test_a_converted_gguf_computes_as_the_original(checkpoint: Checkpoint, tmp_path: Path) -> None:
    architecture = getattr(gguf.MODEL_ARCH, GGUF[checkpoint.name])
    path = convert_to_gguf(checkpoint.reference, architecture, tmp_path / "model.gguf")
    loaded = load_model(path, dtype="fp32", backend="native")
    reference = copy.deepcopy(checkpoint.reference)
    if checkpoint.name.startswith(("gemma2", "gemma3")):  # GGUF has no scale: it follows from the head's width
        for layer in reference.model.layers:
            layer.self_attn.scaling = reference.config.head_dim**-0.5
    exact = logits_of(reference, PROMPTS).log_softmax(-1)
    assert torch.allclose(torch.cat(log_probabilities(loaded, PROMPTS)), exact, atol=tolerance_of(checkpoint), rtol=0)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    reference = write_checkpoint(tmp_path, CASES["qwen3-5"])
    path = convert_to_gguf(reference, gguf.MODEL_ARCH.QWEN35, tmp_path / "model.gguf", num_guessing=1)
    exact = logits_of(reference, PROMPTS).log_softmax(-1)
    loaded = load_model(path, dtype="fp32", backend="native")
    assert loaded.config.num_layers == 3
    assert torch.allclose(torch.cat(log_probabilities(loaded, PROMPTS)), exact, atol=1e-3, rtol=0)


def test_experts_in_one_tensor_are_those_in_many(tmp_path: Path) -> None:
    """Qwen3.5's own files have all experts of a layer together; transformers saves them apart."""
    from safetensors.torch import load_file, save_file

    write_checkpoint(tmp_path, CASES["qwen3-5-moe"])
    apart = log_probabilities(load_model(tmp_path, dtype="fp32", backend="native"), PROMPTS)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts."
        each = [
            [tensors.pop(f"{stem}{expert}.{role}_proj.weight") for expert in range(6)]
            for role in ("gate", "up", "down")
        ]
        gates, ups, downs = map(torch.stack, each)
        tensors |= {f"{stem}gate_up_proj": torch.cat([gates, ups], dim=1), f"{stem}down_proj": downs}
    save_file(tensors, tmp_path / "model.safetensors")
    together = log_probabilities(load_model(tmp_path, dtype="fp32", backend="native"), PROMPTS)
    assert all(map(torch.equal, together, apart))


def test_experts_in_mxfp4_have_the_values_of_transformers(tmp_path: Path) -> None:
    """gpt-oss's own files: blocks of 32 codes of four bits, and a power of two for each."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = write_checkpoint(tmp_path, Case("GptOss", SMALL | GPT_OSS | {"intermediate_size": 96}))
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for name, parameter in reference.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        number, columns, rows = parameter.shape
        blocks = torch.randint(256, (number, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    exact = logits_of(reference, PROMPTS).log_softmax(-1)
    for backend in ("native", "torch"):
        loaded = load_model(tmp_path, dtype="fp32", backend=backend)
        assert torch.allclose(torch.cat(log_probabilities(loaded, PROMPTS)), exact, atol=1e-4, rtol=0)
        if isinstance(loaded.model, NativeDecoder):  # codes are kept, not widened
            assert sum(each is not None for each in loaded.model.linears) == 2 * 2 * 5


@pytest.mark.parametrize("checkpoint", QUANTISED, indirect=True, scope="module")
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights_compute_as_their_values_do(checkpoint: Checkpoint, weights: Any, backend: str) -> None:
    loaded = load_model(checkpoint.path, dtype="fp32", weights=weights, backend=backend)
    reference = copy.deepcopy(checkpoint.reference)
    with torch.inference_mode():
        round_weights(reference, weights)
        expected = logits_of(reference, PROMPTS).log_softmax(-1)
    assert torch.allclose(torch.cat(log_probabilities(loaded, PROMPTS)), expected, atol=1e-4, rtol=0)


def test_beyond_the_original_context_the_factors_are_the_long_ones(
    tmp_path: Path, greedy_by_transformers: Greedy
) -> None:
    """transformers takes the short ones until a sequence is that long, so the prompts are."""
    long = Case("Phi3", SHAPE | {"original_max_position_embeddings": 8, "rope_parameters": LONGROPE})
    reference = write_checkpoint(tmp_path, long)
    loaded = load_model(tmp_path, dtype="fp32")
    assert loaded.config.rope_amplitude > 1
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 8]
    expected = greedy_by_transformers(reference, prompts, NUM_TOKENS, pad_id=2)
    sequences = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    exact = logits_of(reference, sequences).log_softmax(-1)
    assert torch.allclose(torch.cat(log_probabilities(loaded, sequences)), exact, atol=2e-4, rtol=0)


def test_a_bare_decoder_is_named_without_its_prefix(tmp_path: Path) -> None:
    """GPT-2's own files are saved that way, with the causal masks of their attention."""
    from safetensors.torch import load_file, save_file

    write_checkpoint(tmp_path, CASES["gpt2"])
    expected = log_probabilities(load_model(tmp_path, dtype="fp32"), PROMPTS)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): values.clone() for name, values in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 128, 128)}, tmp_path / "model.safetensors")
    found = log_probabilities(load_model(tmp_path, dtype="fp32"), PROMPTS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_fused_product_of_other_heads_than_the_file_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_head_count

    def add_both(writer: gguf.GGUFWriter, count: int) -> None:
        add(writer, count)
        writer.add_head_count_kv(2)

    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count", add_both)
    reference = write_checkpoint(tmp_path, CASES["gpt2"])
    path = convert_to_gguf(reference, gguf.MODEL_ARCH.GPT2, tmp_path / "model.gguf")
    with pytest.raises(InvalidInputError, match="qkv"):
        load_model(path, dtype="fp32")
