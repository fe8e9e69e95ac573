"""Every family against transformers: small random checkpoints, the same tokens and log-probabilities in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.weights.quantize import quantize
from mlsys_orca.scheduling.batch import BatchBuilder, SamplingParams
from torch import Tensor

from tests.conformance.orca.to_gguf import convert_to_gguf

Greedy = Callable[..., list[list[int]]]

VOCAB, NUM_TOKENS = 256, 64
DTYPES = ("fp32", "bf16")
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
JOINS = [0, 0, 3, 3, 4, 8, 8, 13, 20, 21, 30, 30, 31, 44, 45, 60]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPE: dict[str, Any] = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
OPT: dict[str, Any] = SHAPE | {"ffn_dim": 112, "init_std": 0.2}
GEMMA2: dict[str, Any] = SHAPE | {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
}

GEMMA3: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 7,  # the sixth sees everything
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
YARN: dict[str, Any] = {  # most of the answers are beyond the original context
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [1 + i / 2 for i in range(8)],
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: the family's classes in transformers, and its configuration."""

    family: str
    config: dict[str, Any]


CASES = {
    "qwen2": Case("Qwen2", SHAPE),
    "qwen2-tied-window": Case(
        "Qwen2",
        SHAPE | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gpt2": Case("GPT2", GPT2),
    "gpt2-untied": Case(
        "GPT2",
        GPT2
        | {"n_inner": 96, "activation_function": "relu", "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "qwen3": Case("Qwen3", SHAPE | {"head_dim": 32}),
    "qwen3-biases": Case("Qwen3", SHAPE | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt-neox": Case("GPTNeoX", SHAPE),
    "gpt-neox-sequential": Case(
        "GPTNeoX",
        SHAPE
        | {"use_parallel_residual": False, "attention_bias": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "gpt-neox-sequential-biased": Case("GPTNeoX", SHAPE | {"use_parallel_residual": False}),
    "opt": Case("OPT", OPT),
    "opt-post-norm": Case("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-bare": Case(
        "OPT",
        OPT
        | {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True}
        | {"activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "phi3": Case("Phi3", SHAPE | {"sliding_window": 10}),
    "phi3-partial": Case(
        "Phi3",
        SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}},
    ),
    "mixtral": Case("Mixtral", SHAPE | {"num_local_experts": 5}),
    "mixtral-one-expert": Case(
        "Mixtral", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 12}
    ),
    "gemma2": Case("Gemma2", GEMMA2),
    "gemma2-uncapped": Case(
        "Gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3": Case("Gemma3Text", GEMMA3),
    "gemma3-scaled": Case(
        "Gemma3Text",
        GEMMA3
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        SHAPE
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        | {"head_dim": 32},
    ),
    "qwen2-moe": Case(
        "Qwen2Moe",
        SHAPE
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_sliding_window": False}
        | {"shared_expert_intermediate_size": 80, "tie_word_embeddings": True},
    ),
    "smollm3": Case("SmolLM3", SHAPE | {"num_hidden_layers": 4}),
    "smollm3-window": Case(
        "SmolLM3", SHAPE | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9}
    ),
    "llama-yarn": Case("Llama", SHAPE | {"rope_parameters": YARN}),
    "qwen2-yarn-by-hand": Case(
        "Qwen2",
        SHAPE
        | {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "llama-dynamic": Case("Llama", SHAPE | {"rope_parameters": DYNAMIC}),
    "phi3-longrope-short": Case(
        "Phi3", SHAPE | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}}
    ),
    "mistral-window": Case("Mistral", SHAPE | {"sliding_window": 11}),
}

IN_TORCH_ONCE = {"mixtral-one-expert", "qwen2-moe", "qwen3-moe"}  # experts are slow there, and alike


def write_checkpoint(path: Path, case: Case, *, auto: str = "AutoModelForCausalLM") -> Any:
    """A directory as transformers saves one, nothing left at a value that would hide a mistake; returns the model."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    config._attn_implementation = "eager"  # the others leave soft caps out
    model: Any = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.2)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 2
    return model


def log_probabilities(loaded: LoadedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Return log-probabilities of each sequence's next tokens, all run as one ragged batch."""
    cache = new_kv_cache(loaded.model, num_blocks=8 * len(sequences), num_states=len(sequences))
    builder = BatchBuilder()
    for i, sequence in enumerate(sequences):
        table = tuple(range(8 * i, 8 * i + 8))
        builder.add(str(i), sequence, num_computed_tokens=0, block_table=table, sampling=SamplingParams(), state_slot=i)
    rows = range(sum(map(len, sequences)))
    with torch.inference_mode():
        inputs = ForwardInputs(builder.build(), block_size=cache.block_size, device="cpu", wanted=rows)
        logits = loaded.model(inputs, cache)
    return list(torch.split(logits.log_softmax(-1), [len(sequence) for sequence in sequences]))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    tmp_path: Path, name: str, greedy_by_orca: Greedy, greedy_by_transformers: Greedy
) -> None:
    reference = write_checkpoint(tmp_path, CASES[name])
    expected = greedy_by_transformers(reference, PROMPTS, NUM_TOKENS, pad_id=2)
    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    with torch.inference_mode():
        theirs = [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]
    # Of experts one family is enough in torch's operators.
    for backend in ("auto",) if name in IN_TORCH_ONCE else ("auto", "torch"):
        loaded = load_model(tmp_path, dtype="fp32", backend=backend)
        assert isinstance(loaded.model, NativeDecoder) == (backend == "auto")
        loaded.tokenizer.eos_ids = frozenset()  # the reference does not stop either
        assert greedy_by_orca(loaded, PROMPTS, NUM_TOKENS, joins=JOINS) == expected
        assert [greedy_by_orca(loaded, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS] == expected
        for logits, ours in zip(theirs, log_probabilities(loaded, sequences), strict=True):
            assert logits.std() > 0.5  # distinct enough for greedy choices to mean something
            assert torch.allclose(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_beyond_the_original_context_the_factors_are_the_long_ones(
    tmp_path: Path, greedy_by_orca: Greedy, greedy_by_transformers: Greedy
) -> None:
    """transformers takes the short ones until a sequence is that long, so the prompts are."""
    reference = write_checkpoint(
        tmp_path, Case("Phi3", SHAPE | {"original_max_position_embeddings": 8, "rope_parameters": LONGROPE})
    )
    loaded = load_model(tmp_path, dtype="fp32")
    loaded.tokenizer.eos_ids = frozenset()
    assert loaded.config.rope_amplitude > 1
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 8]
    expected = greedy_by_transformers(reference, prompts, NUM_TOKENS, pad_id=2)
    assert greedy_by_orca(loaded, prompts, NUM_TOKENS, joins=JOINS[: len(prompts)]) == expected
    for prompt, ours in zip(prompts, log_probabilities(loaded, prompts), strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert torch.allclose(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_bf16_answers_nearly_as_fp32_does(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, CASES[name])
    exact, rounded = (torch.cat(log_probabilities(load_model(tmp_path, dtype=dtype), PROMPTS)) for dtype in DTYPES)
    assert rounded.dtype == torch.float32
    assert torch.corrcoef(torch.stack((exact.flatten(), rounded.flatten())))[0, 1] > 0.98


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


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen2", "QWEN2"),
        ("qwen3", "QWEN3"),
        ("gpt2", "GPT2"),
        ("gpt-neox", "GPTNEOX"),
        ("gpt-neox-sequential-biased", "GPTNEOX"),
        ("phi3", "PHI3"),
        ("phi3-partial", "PHI3"),
        ("mixtral", "LLAMA"),
        ("gemma2", "GEMMA2"),
        ("gemma3", "GEMMA3"),
        ("qwen3-moe", "QWEN3MOE"),
        ("smollm3", "SMOLLM3"),
        ("llama-yarn", "LLAMA"),
    ],
)
def test_a_converted_gguf_computes_as_the_original(tmp_path: Path, name: str, architecture: str) -> None:
    case = CASES[name]
    reference = write_checkpoint(tmp_path, case)
    if architecture in ("GEMMA2", "GEMMA3"):  # what GGUF does not say: the scale follows from the head's width
        for layer in reference.model.layers:
            layer.self_attn.scaling = reference.config.head_dim**-0.5
    path = convert_to_gguf(reference, getattr(gguf.MODEL_ARCH, architecture), tmp_path / "model.gguf")
    for prompt, ours in zip(PROMPTS, log_probabilities(load_model(path, dtype="fp32"), PROMPTS), strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert torch.allclose(ours, expected, atol=1e-4, rtol=0)


AT_LEAST_8_BITS = ("embed_", "wte", "lm_head", "q_proj", "k_proj", "v_proj", "qkv", "query_key_value", "c_attn")


def round_weights(model: Any, weights: str) -> None:
    """Give every matrix of a product the values that ours has when it is loaded with ``weights``."""
    for name, parameter in model.named_parameters():
        floating = ("wpe", "embed_positions", "mlp.gate.weight", "shared_expert_gate")
        is_kept = parameter.ndim == 1 or any(part in name for part in floating)
        if is_kept:
            continue
        is_transposed = "transformer" in name and ".c_" in name
        matrix = (parameter.T if is_transposed else parameter.flatten(0, -2)).contiguous()
        quantized = quantize(
            matrix,
            bits=8 if weights == "int8" or any(part in name for part in AT_LEAST_8_BITS) else 4,
            group_size=32 if matrix.shape[1] % 32 == 0 else 16,
        )
        values = quantized.dequantized()
        parameter.copy_(values.T if is_transposed else values.view_as(parameter))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("opt-bare", "gemma2-uncapped", "gpt2-untied")])
def test_quantised_weights_compute_as_their_values_do(tmp_path: Path, name: str, weights: Any, backend: str) -> None:
    reference = write_checkpoint(tmp_path, CASES[name])
    loaded = load_model(tmp_path, dtype="fp32", weights=weights, backend=backend)
    with torch.inference_mode():
        round_weights(reference, weights)
        for prompt, ours in zip(PROMPTS, log_probabilities(loaded, PROMPTS), strict=True):
            expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
            assert torch.allclose(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "architecture"), [("gpt2", "GPT2"), ("gpt-neox", "GPTNEOX")])
def test_a_fused_product_of_other_heads_than_the_file_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    add = gguf.GGUFWriter.add_head_count

    def add_both(writer: gguf.GGUFWriter, count: int) -> None:
        add(writer, count)
        writer.add_head_count_kv(2)

    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count", add_both)
    reference = write_checkpoint(tmp_path, CASES[name])
    path = convert_to_gguf(reference, getattr(gguf.MODEL_ARCH, architecture), tmp_path / "model.gguf")
    with pytest.raises(InvalidInputError, match="qkv"):
        load_model(path, dtype="fp32")
