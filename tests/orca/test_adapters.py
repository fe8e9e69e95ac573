"""LoRA adapters: each request under its own in one batch, as models into which they were merged, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.scheduling.batch import GenerationRequest, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.paged import PagedScheduler
from safetensors.torch import save_file

# module's name -> (GGUF's tensor, rows, columns)
PRODUCTS = {
    "self_attn.q_proj": ("attn_q", 64, 64),
    "self_attn.v_proj": ("attn_v", 32, 64),
    "self_attn.o_proj": ("attn_output", 64, 64),
    "mlp.gate_proj": ("ffn_gate", 96, 64),
    "mlp.up_proj": ("ffn_up", 96, 64),
    "mlp.down_proj": ("ffn_down", 64, 96),
}


def write_adapter(path: Path, seed: int, modules: list[str], **config: Any) -> dict[str, torch.Tensor]:
    """A PEFT directory of rank 4; returns what it adds to each weight, by GGUF's names."""
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for layer in range(2):
        for module in modules:
            name, rows, columns = PRODUCTS[module]
            down, up = (torch.randn(shape, generator=generator) * 0.2 for shape in ((4, columns), (rows, 4)))
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
            scale = 8 / 2 if config.get("use_rslora") else 8 / 4
            deltas[f"blk.{layer}.{name}.weight"] = scale * up @ down
    save_file(tensors, path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": modules, "bias": "none"} | config
    (path / "adapter_config.json").write_text(json.dumps(raw))
    return deltas


def interleaved(delta: torch.Tensor) -> np.ndarray:
    """Rows of heads of 16 features in the order in which GGUF's converter keeps queries and keys of Llama."""
    return delta.view(-1, 2, 8, delta.shape[1]).transpose(1, 2).reshape(delta.shape).numpy()


def generate(model: DecoderModel, prompts: Mapping[str, tuple[str | None, tuple[int, ...]]]) -> dict[str, list[int]]:
    """Greedy answers to all ``prompts``, name -> (adapter, ids), in shared batches with a prefix cache."""
    tables = BlockTables(num_blocks=32)
    scheduler = PagedScheduler(tables, max_batch_size=8, max_model_len=64)
    runner = Runner(model, new_kv_cache(model, num_blocks=32))
    results = {}
    for round_ in range(2):  # the second round finds the first one's prefixes kept
        for name, (adapter, ids) in prompts.items():
            request = GenerationRequest(
                request_id=f"{name}/{round_}", prompt_token_ids=ids, max_new_tokens=12, adapter=adapter,
                sampling=SamplingParams(num_logprobs=0),
            )  # fmt: skip
            scheduler.add(request, 0.0)
        while scheduler.num_unfinished:
            batch = scheduler.next_batch(WorkerId(0), 0.0)
            for finished in scheduler.complete(batch, runner.run(batch), 0.0):
                results[finished.request_id] = [token.token_id for token in finished.result.tokens]
    assert scheduler.pool.num_cached_tokens > 0
    return results


def test_two_adapters_and_none_in_one_batch_are_the_merged_models(
    make_gguf: Callable[..., Path], weights: dict[str, np.ndarray], tmp_path: Path
) -> None:
    base = load_model(make_gguf(), dtype="fp32", backend="torch").model
    adapters = {
        "all": write_adapter(tmp_path / "all", 1, list(PRODUCTS)),
        "some": write_adapter(tmp_path / "some", 2, ["self_attn.q_proj", "mlp.down_proj"], use_rslora=True),
    }
    prompt = tuple(range(30, 50))
    prompts = {name: (None if name == "none" else name, prompt) for name in ("none", *adapters)}
    together = generate(AdaptedDecoder(base, {name: tmp_path / name for name in adapters}), prompts)
    for name in ("none", *adapters):
        merged = {key: value.copy() for key, value in weights.items()}
        for key, delta in adapters.get(name, {}).items():
            merged[key] += interleaved(delta) if "attn_q" in key else delta.numpy()
        model = load_model(make_gguf(tensors=merged), dtype="fp32", backend="torch").model
        expected = generate(model, {"merged": (None, prompt)})
        for round_ in range(2):
            assert together[f"{name}/{round_}"] == expected[f"merged/{round_}"], name
    assert len({tuple(tokens) for tokens in together.values()}) == 3, "adapters change answers"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"use_something_new": True}, "use_something_new = True, which is not known here"),
    ],
    ids=["dora", "type", "saved", "pattern", "router", "unknown"],
)
def test_unimplemented_options_are_refused_by_name(
    make_gguf: Callable[..., Path], tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    write_adapter(tmp_path / "a", 1, ["self_attn.q_proj"], **config)
    model = load_model(make_gguf(), dtype="fp32", backend="torch").model
    with pytest.raises(InvalidInputError, match=says):
        AdaptedDecoder(model, {"a": tmp_path / "a"})


def test_a_configuration_as_peft_writes_it_is_taken(make_gguf: Callable[..., Path], tmp_path: Path) -> None:
    """The fields of peft 0.18, with what training leaves in them."""
    trained: dict[str, Any] = {"base_model_name_or_path": "a/b", "peft_version": "0.18.1", "lora_dropout": 0.05}
    trained |= {"inference_mode": True, "init_lora_weights": "pissa", "task_type": "CAUSAL_LM", "megatron_core": "m"}
    trained |= {"auto_mapping": {"unsloth_fixed": True}, "qalora_group_size": 16, "layers_to_transform": [0, 1]}
    nothing = ["alora_invocation_tokens", "arrow_config", "eva_config", "layer_replication", "modules_to_save"]
    trained |= {"rank_pattern": {}, "loftq_config": {}, "use_dora": False, **dict.fromkeys(nothing)}
    write_adapter(tmp_path / "a", 1, ["self_attn.q_proj"], **trained)
    model = load_model(make_gguf(), dtype="fp32", backend="torch").model
    assert AdaptedDecoder(model, {"a": tmp_path / "a"}).adapters == {"a"}


def test_an_adapter_of_another_model_and_a_directory_without_one_are_refused(
    make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "a", 1, ["self_attn.q_proj"])
    save_file(
        {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
        },
        tmp_path / "a" / "adapter_model.safetensors",
    )
    model = load_model(make_gguf(), dtype="fp32", backend="torch").model
    with pytest.raises(InvalidInputError, match="of another model"):
        AdaptedDecoder(model, {"a": tmp_path / "a"})
    model = load_model(make_gguf(), dtype="fp32", backend="torch").model
    with pytest.raises(InvalidInputError, match="no PEFT adapter"):
        AdaptedDecoder(model, {"a": tmp_path / "nothing"})
