"""LoRA adapters on parts of a model: each part has its rows or columns of them, and the bits of one sliced process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.adapters import AdaptedDecoder, AdapterFiles, read_adapter
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.parallel.loading import load_shard
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams, SliceDetails
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from tests.orca.parallel.places import BLOCK, NUM_BLOCKS, VOCAB, run_places, write_checkpoint

PRODUCTS = {  # of each family: the module's name -> (rows, columns)
    "llama-tied": {
        "model.layers.{}.self_attn.q_proj": (256, 96),
        "model.layers.{}.self_attn.v_proj": (128, 96),
        "model.layers.{}.self_attn.o_proj": (96, 256),
        "model.layers.{}.mlp.gate_proj": (256, 96),
        "model.layers.{}.mlp.down_proj": (96, 256),
    },
    "phi3": {
        "model.layers.{}.self_attn.qkv_proj": (512, 256),
        "model.layers.{}.mlp.gate_up_proj": (512, 256),
        "model.layers.{}.mlp.down_proj": (256, 256),
    },
    "gpt2": {
        "transformer.h.{}.attn.c_attn": (768, 256),
        "transformer.h.{}.attn.c_proj": (256, 256),
        "transformer.h.{}.mlp.c_proj": (256, 1024),
    },
    "gpt-neox": {
        "gpt_neox.layers.{}.attention.query_key_value": (768, 256),
        "gpt_neox.layers.{}.attention.dense": (256, 256),
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": (256, 256),
    },
}


def write_adapter(path: Path, family: str, seed: int) -> AdapterFiles:
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(6):
        for name, (rows, columns) in PRODUCTS[family].items():
            stem = f"base_model.model.{name.format(layer)}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn((4, columns), generator=generator) * 0.2
            tensors[f"{stem}.lora_B.weight"] = torch.randn((rows, 4), generator=generator) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(PRODUCTS[family]), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(raw))
    return read_adapter(path)


def merged(path: Path, to: Path, family: str, files: AdapterFiles) -> Path:
    """The model with an adapter's products added to its weights."""
    shutil.copytree(path, to)
    tensors, added = load_file(to / "model.safetensors"), load(files.weights)
    for layer in range(6):
        for name in PRODUCTS[family]:
            stem = name.format(layer)
            delta = (
                2 * added[f"base_model.model.{stem}.lora_B.weight"] @ added[f"base_model.model.{stem}.lora_A.weight"]
            )
            tensors[f"{stem}.weight"] += delta.T if family == "gpt2" else delta
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def batch_of() -> IterationBatch:
    """Two requests under two adapters, and one under none."""
    builder = BatchBuilder()
    for index, (key, length) in enumerate((("one", 20), (None, 7), ("two", 1))):
        builder.add(
            str(index),
            [(7 * i + 13 * index) % VOCAB for i in range(length)],
            num_computed_tokens=0,
            block_table=(2 * index, 2 * index + 1),
            sampling=SamplingParams(),
            details=None if key is None else SliceDetails(adapter=key),
        )
    return builder.build()


@pytest.mark.parametrize("family", PRODUCTS)
def test_adapters_in_parts_give_the_bits_of_one_sliced_process(tmp_path: Path, family: str) -> None:
    path, batch = write_checkpoint(tmp_path / "model", family), batch_of()
    files = {key: write_adapter(tmp_path / key, family, seed) for seed, key in enumerate(("one", "two"))}
    options: dict[str, Any] = {"dtype": "fp32", "weights": "float", "slices": True, "adapters": files}
    with intra_op_threads(1):
        (alone,) = run_places(path, [batch], ranks=1, stages=1, **options)
        for ranks, stages in ((2, 1), (4, 1), (1, 2), (2, 3)):
            (found,) = run_places(path, [batch], ranks=ranks, stages=stages, **options)
            assert torch.equal(found.logits, alone.logits), (ranks, stages)
        assert torch.allclose(alone.logits, by_whole(path, batch, files), rtol=1e-3, atol=2e-3)
        (bare,) = run_places(path, [batch], ranks=2, stages=1, **(options | {"adapters": {}}))
    differs = (bare.logits != alone.logits).any(dim=1).tolist()
    assert differs == [True, False, True]


def by_whole(path: Path, batch: IterationBatch, files: dict[str, AdapterFiles], *, without: bool = False) -> Tensor:
    model = load_model(path, dtype="fp32", backend="torch").model
    adapted: Any = model if without else AdaptedDecoder(model, files)
    cache = new_kv_cache(adapted, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    with torch.inference_mode():
        logits: Tensor = adapted(ForwardInputs(batch, block_size=BLOCK, device="cpu"), cache).clone()
        return logits


@pytest.mark.parametrize("family", PRODUCTS)
def test_an_adapter_gives_what_the_model_gives_that_it_was_merged_into(tmp_path: Path, family: str) -> None:
    path, batch = write_checkpoint(tmp_path / "model", family), batch_of()
    files = {key: write_adapter(tmp_path / key, family, seed) for seed, key in enumerate(("one", "two"))}
    adapted = by_whole(path, batch, files)
    for row, key in ((0, "one"), (2, "two")):
        alone = by_whole(merged(path, tmp_path / f"merged-{key}", family, files[key]), batch, files, without=True)
        assert torch.allclose(adapted[row], alone[row], rtol=1e-3, atol=5e-3), key


def test_an_adapter_that_does_not_fit_is_refused_by_every_part(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "llama-tied")
    wrong = write_adapter(tmp_path / "gpt2", "gpt2", 0)
    shard: Any = load_shard(path, Placement(stage=1, num_stages=2, rank=1, num_ranks=2), takes_adapters=True)
    with pytest.raises(InvalidInputError, match="which is no pair"):
        shard.add_adapter("wrong", wrong)
    assert shard.adapters == frozenset()
    right = write_adapter(tmp_path / "right", "llama-tied", 0)
    shard.add_adapter("right", right)
    assert shard.adapters == {"right"}
    shard.remove_adapter("right")
    assert shard.adapters == frozenset()
    plain: Any = load_shard(path, Placement(rank=0, num_ranks=2), backend="torch")
    with pytest.raises(InvalidInputError, match="takes no adapters"):
        plain.add_adapter("right", right)
    with pytest.raises(InvalidInputError, match="adapters need torch's operators"):
        load_shard(path, Placement(), backend="native", takes_adapters=True)
