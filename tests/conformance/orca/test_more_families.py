"""Families of the second row against transformers: small random checkpoints, served with preemption, in every form.

One served run a case: pages so few that requests are preempted, prefixes that are shared, chunks that end within
prompts. :mod:`.test_architectures` has the families that came first, and the helpers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.drafting import ModelDrafter
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

from tests.conformance.orca.test_architectures import (
    GPT2,
    SHAPE,
    TOKENS,
    VOCAB,
    YARN,
    Case,
    log_probabilities,
    round_weights,
    write_checkpoint,
)
from tests.conformance.orca.to_gguf import convert_to_gguf

Greedy = Callable[..., list[list[int]]]

NUM_TOKENS, NUM_BLOCKS, BLOCK = 24, 14, 16
SHARED = [(5 * i + 2) % VOCAB for i in range(32)]  # two whole blocks that three prompts begin with
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate([1, 20, 33, 5, 2, 40])]
PROMPTS += [[*SHARED, 3], [*SHARED, 5, 6, 7], SHARED]
SMALL = SHAPE | {"num_hidden_layers": 2}
HALF: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 0.5}
MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 20,
    "n_groups": 2,
    "chunk_size": 8,
    "initializer_range": 0.3,
}
BAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 8}
GRANITE_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 56}
QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_5: dict[str, Any] = {
    key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and "moe" not in key
} | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
BLOOM = TOKENS | {"hidden_size": 60, "n_layer": 2, "n_head": 5, "initializer_range": 0.2}
MPT = TOKENS | {"d_model": 60, "n_layers": 2, "n_heads": 5, "max_seq_len": 128, "initializer_range": 0.2}
COHERE2 = {"logit_scale": 2.0, "sliding_window": 9, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
FULL = ["full_attention", "sliding_attention"]
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    | {"original_max_position_embeddings": 32}
}
DEEPSEEK = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20} | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
MINICPM3 = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20} | {
    "num_key_value_heads": 4,
    "dim_model_base": 16,
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
}
GROUPS = {"q_lora_rank": 32, "n_group": 4, "topk_group": 2}
MSCALE = {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 32, "beta_slow": 1}}
ONE_SCALE = {
    "rope_parameters": MSCALE["rope_parameters"] | {"mscale": 0.6}
}  # as the models have it, and a GGUF says it
CASES = {
    "gemma": Case("Gemma", SMALL | {"head_dim": 32}),
    "granite": Case("Granite", SMALL | GRANITE),
    "granite-tied": Case(
        "Granite", SMALL | GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "olmo2": Case("Olmo2", SMALL | {"rope_parameters": LLAMA3}),
    "olmo2-biased": Case("Olmo2", SMALL | {"attention_bias": True, "num_key_value_heads": 4}),
    "stablelm": Case("StableLm", SMALL | HALF | {"use_qkv_bias": True}),
    "stablelm-parallel": Case("StableLm", SMALL | {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": Case("Starcoder2", SMALL | {"sliding_window": 11}),
    "starcoder2-bare": Case("Starcoder2", SMALL | {"use_bias": False, "tie_word_embeddings": False}),
    "cohere": Case("Cohere", SMALL | {"logit_scale": 2.0, "rope_parameters": LINEAR}),
    "cohere-norms": Case("Cohere", SMALL | {"logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": Case("Cohere2", SMALL | COHERE2),
    "glm": Case("Glm", SMALL | {"head_dim": 32}),
    "glm4": Case("Glm4", SMALL | {"head_dim": 16}),
    "phi": Case("Phi", SMALL | {"num_key_value_heads": 4}),
    "phi-norms": Case("Phi", SMALL | {"qk_layernorm": True, "tie_word_embeddings": True}),
    "gptj": Case("GPTJ", GPT2 | {"n_layer": 2, "rotary_dim": 8}),
    "falcon": Case("Falcon", SMALL),
    "falcon-new": Case("Falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-new-one-norm": Case(
        "Falcon", SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    "falcon-sequential": Case(
        "Falcon", SMALL | {"parallel_attn": False, "multi_query": False, "tie_word_embeddings": False}
    ),
    "bloom": Case("Bloom", BLOOM),
    "mpt": Case("Mpt", MPT),
    "qwen2-moe-sums-to-one": Case("Qwen2Moe", SMALL | EXPERTS | {"shared_expert_intermediate_size": 80}),
    "qwen3-moe-of-all": Case("Qwen3Moe", SMALL | EXPERTS | {"norm_topk_prob": False, "head_dim": 16}),
    "gpt-oss": Case("GptOss", SMALL | GPT_OSS),
    "gpt-oss-other-limits": Case(
        "GptOss", SMALL | GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.2, "layer_types": FULL}
    ),
    "deepseek-v2": Case("DeepseekV2", SMALL | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2-groups": Case(
        "DeepseekV2", SMALL | DEEPSEEK | MSCALE | GROUPS | {"topk_method": "group_limited_greedy", "rms_norm_eps": 1e-5}
    ),
    "deepseek-v3": Case("DeepseekV3", SMALL | DEEPSEEK | ONE_SCALE | GROUPS | {"num_hidden_layers": 3}),
    "minicpm3": Case("MiniCPM3", SMALL | MINICPM3),
    "minicpm3-plain": Case("MiniCPM3", SMALL | MINICPM3 | {"q_lora_rank": None, "scale_depth": None}),
    "mamba2": Case("Mamba2", TOKENS | MAMBA2),
    "mamba2-tied": Case("Mamba2", TOKENS | MAMBA2 | {"n_groups": 1, "conv_kernel": 3, "tie_word_embeddings": True}),
    "bamba": Case("Bamba", SMALL | BAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3}),
    "granite-hybrid": Case(
        "GraniteMoeHybrid",
        SMALL | BAMBA | GRANITE | GRANITE_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite-hybrid-dense": Case(
        "GraniteMoeHybrid",
        SMALL
        | BAMBA
        | GRANITE
        | {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0}
        | {"shared_intermediate_size": 56},
    ),
    "granite-hybrid-rotary": Case(
        "GraniteMoeHybrid",
        SMALL | BAMBA | {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    ),
    "qwen3-next": Case("Qwen3Next", SMALL | QWEN3_NEXT),
    "qwen3-5": Case("Qwen3_5Text", SMALL | QWEN3_5),
    "qwen3-5-moe": Case(
        "Qwen3_5MoeText", {key: value for key, value in (SMALL | QWEN3_NEXT).items() if key != "intermediate_size"}
    ),
    "mpt-scaled": Case("Mpt", MPT | {"attn_config": {"softmax_scale": 0.2}}),
}
GUESSED = ("gpt-oss", "deepseek-v2", "deepseek-v3", "minicpm3", "qwen3-moe-of-all")
GGUF = {
    "gemma": "GEMMA",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "stablelm-parallel": "STABLELM",
    "starcoder2-bare": "STARCODER2",
    "cohere-norms": "COMMAND_R",
    "cohere2": "COHERE2",
    "glm4": "GLM4",
    "phi": "PHI2",
    "falcon-new": "FALCON",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "gpt-oss": "GPT_OSS",
    "deepseek-v3": "DEEPSEEK2",
    "mamba2": "MAMBA2",
    "mamba2-tied": "MAMBA2",
    "granite-hybrid": "GRANITE_HYBRID",
    "granite-hybrid-dense": "GRANITE_HYBRID",
    "qwen3-next": "QWEN3NEXT",
    "qwen3-5": "QWEN35",
    "qwen3-5-moe": "QWEN35MOE",
}


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
    native = load_model(path, dtype="fp32", backend="native")
    native.tokenizer.eos_ids = frozenset()  # the reference does not stop either
    return Checkpoint(request.param, path, reference, native)


def tolerance_of(checkpoint: Checkpoint) -> float:
    """Of log-probabilities: transformers' own two forms of the delta rule differ by 4e-4 in a token of these."""
    return 1e-3 if checkpoint.name.startswith(("qwen3-next", "qwen3-5")) else 1e-4


@torch.inference_mode()
def logits_of(reference: Any, sequences: list[list[int]]) -> torch.Tensor:
    return torch.cat([reference(torch.tensor([sequence])).logits[0] for sequence in sequences])


def serve(
    model: Any,
    policy: str,
    *,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    num_draft_tokens: int = 0,
    drafter: ModelDrafter | None = None,
    **options: Any,
) -> tuple[list[list[int]], Any, BlockTables]:
    """Serve all prompts, a new one every other iteration; return the answers, the scheduler's pool and the blocks."""
    num_states = None if model.config.recurrent is None else 8
    tables = BlockTables(num_blocks=NUM_BLOCKS, block_size=BLOCK, num_states=num_states)
    scheduler: Any = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=8,
        max_model_len=128,
        options=options,
    )
    scheduler.pool.num_draft_tokens, scheduler.pool.drafter = num_draft_tokens, drafter
    requests = [
        GenerationRequest(
            request_id=str(i), prompt_token_ids=tuple(prompt), max_new_tokens=NUM_TOKENS, sampling=sampling
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    cache = new_kv_cache(model, num_blocks=NUM_BLOCKS, num_states=num_states or 1)
    trace = [(2.0 * i, request) for i, request in enumerate(requests)]
    served = simulate(scheduler, SimulatedExecutor(lambda _: 1.0, Runner(model, cache).run), trace)
    answers = {request.request_id: request.finished.result.tokens for request in served.requests}
    return [[token.token_id for token in answers[each.request_id]] for each in requests], scheduler.pool, tables


def test_served_answers_are_those_of_transformers(checkpoint: Checkpoint, greedy_by_transformers: Greedy) -> None:
    assert isinstance(checkpoint.native.model, NativeDecoder)
    expected = greedy_by_transformers(checkpoint.reference, PROMPTS, NUM_TOKENS, pad_id=2)
    answers, pool, tables = serve(checkpoint.native.model, "chunked", max_batch_tokens=24)
    assert answers == expected
    assert pool.num_preemptions > 0
    assert (pool.num_cached_tokens > 0) is (checkpoint.native.config.recurrent is None)  # states are not shared
    assert tables.num_free_blocks == NUM_BLOCKS

    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    logits = logits_of(checkpoint.reference, sequences)
    assert logits.std() > 0.3  # distinct enough for greedy choices to mean something
    together = log_probabilities(checkpoint.native, sequences)
    assert torch.allclose(torch.cat(together), logits.log_softmax(-1), atol=tolerance_of(checkpoint), rtol=0)
    for sequence, ours in zip(sequences, together, strict=True):
        assert torch.equal(log_probabilities(checkpoint.native, [sequence])[0], ours)  # neighbours change no bit


def test_torchs_operators_and_bf16_give_nearly_the_same(checkpoint: Checkpoint) -> None:
    exact = logits_of(checkpoint.reference, PROMPTS).log_softmax(-1)
    torchs = torch.cat(log_probabilities(load_model(checkpoint.path, dtype="fp32", backend="torch"), PROMPTS))
    assert torch.allclose(torchs, exact, atol=tolerance_of(checkpoint), rtol=0)
    for backend in ("native", "torch"):
        rounded = torch.cat(log_probabilities(load_model(checkpoint.path, dtype="bf16", backend=backend), PROMPTS))
        assert torch.corrcoef(torch.stack((exact.flatten(), rounded.flatten())))[0, 1] > 0.98


def test_guesses_change_no_answer(checkpoint: Checkpoint) -> None:
    """By lookup, and by a model: the same in int4, which is right often and not always."""
    if checkpoint.name not in GUESSED:
        pytest.skip("one of each attention and each choice of experts is enough; a state takes nothing back")
    model, nearly = checkpoint.native.model, load_model(checkpoint.path, dtype="fp32", weights="int4").model
    for sampling in (SamplingParams(), SamplingParams(temperature=0.5, seed=3)):
        expected, _, _ = serve(model, "paged", sampling=sampling)
        for drafter in (None, ModelDrafter(nearly, num_blocks=NUM_BLOCKS, vocab_size=VOCAB)):
            answers, pool, tables = serve(model, "paged", sampling=sampling, num_draft_tokens=3, drafter=drafter)
            assert answers == expected
            assert tables.num_free_blocks == NUM_BLOCKS
            if drafter is not None:
                assert 0 < pool.num_right < pool.num_guessed
                assert drafter.tables.num_free_blocks == NUM_BLOCKS


def test_a_converted_gguf_computes_as_the_original(checkpoint: Checkpoint, tmp_path: Path) -> None:
    if checkpoint.name not in GGUF:
        pytest.skip("GGUF has no such layout, or another case has it")
    architecture = getattr(gguf.MODEL_ARCH, GGUF[checkpoint.name])
    path = convert_to_gguf(checkpoint.reference, architecture, tmp_path / "model.gguf")
    loaded = load_model(path, dtype="fp32", backend="native")
    exact = logits_of(checkpoint.reference, PROMPTS).log_softmax(-1)
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


def test_quantised_weights_compute_as_their_values_do(checkpoint: Checkpoint) -> None:
    if checkpoint.name not in ("gemma", "granite", "cohere", "glm4", "falcon-new", "stablelm"):
        pytest.skip("one of each shape is enough")
    loaded = load_model(checkpoint.path, dtype="fp32", weights="int8")
    kept = {name: parameter.detach().clone() for name, parameter in checkpoint.reference.named_parameters()}
    with torch.inference_mode():
        round_weights(checkpoint.reference, "int8")
        expected = logits_of(checkpoint.reference, PROMPTS).log_softmax(-1)
        checkpoint.reference.load_state_dict(kept, strict=False)
    assert torch.allclose(torch.cat(log_probabilities(loaded, PROMPTS)), expected, atol=1e-4, rtol=0)
