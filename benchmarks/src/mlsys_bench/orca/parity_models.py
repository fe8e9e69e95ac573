"""Write small models of the shapes that ``mlsys orca bench parity`` divides, with random weights, and adapters.

A program of its own: transformers leaves threads behind, and who has threads cannot fork.

    python -m mlsys_bench.orca.parity_models FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCAB = 259  # no number of ranks divides it
NUM_LAYERS = 6
ADAPTERS = ("one", "two")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
_T5: dict[str, Any] = {"d_model": 64, "d_kv": 32, "d_ff": 256, "num_layers": 4, "num_decoder_layers": 2, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 24, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPE),
    "gpt2": ("GPT2", _SHAPE | {"hidden_size": 256}),
    "mixtral": ("Mixtral", _SHAPE | {"hidden_size": 256, "num_local_experts": 5}),
    "t5": ("T5", _T5 | {"vocab_size": VOCAB}),
}
_PRODUCTS = {  # that adapters change: the module's name -> (rows, columns)
    "llama": {"model.layers.{}.self_attn.q_proj": (256, 96), "model.layers.{}.mlp.down_proj": (96, 256)},
    "gpt2": {"transformer.h.{}.attn.c_attn": (768, 256), "transformer.h.{}.mlp.c_proj": (256, 1024)},
    "smollm2": {"model.layers.{}.self_attn.q_proj": (576, 576), "model.layers.{}.mlp.down_proj": (576, 1536)},
}
_LAYERS = {"smollm2": 30}


def write(folder: Path) -> None:
    """Write every model below ``folder``, and two adapters for those that take some."""
    import tokenizers
    import torch
    import transformers

    for name, (family, shape) in MODELS.items():
        torch.manual_seed(5)
        config = getattr(transformers, f"{family}Config")(**shape)
        kind: Any = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms are ones and biases zeros otherwise
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(folder / name)
        vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0"))
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text("{}")
    for name in _PRODUCTS:
        for seed, adapter in enumerate(ADAPTERS):
            _write_adapter(folder / f"{name}-{adapter}", name, seed)


def _write_adapter(path: Path, name: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    scale = 0.02 if name == "smollm2" else 0.2
    for layer in range(_LAYERS.get(name, NUM_LAYERS)):
        for module, (rows, columns) in _PRODUCTS[name].items():
            stem = f"base_model.model.{module.format(layer)}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn((4, columns), generator=generator) * scale
            tensors[f"{stem}.lora_B.weight"] = torch.randn((rows, 4), generator=generator) * scale
    save_file(tensors, path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(_PRODUCTS[name]), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(raw))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
