"""LoRA adapters (Hu et al., 2021): several on one model, each request under its own, all in one batch.

An adapter adds ``scale * (x A^T) B^T`` to some products. Its rows of the flattened batch are gathered, so that each
adapter costs two thin products more, and rows without one nothing. Read from PEFT's directories. The products are
torch's: a model with adapters runs in torch's operators.

The engine holds each under a key made of its name and its contents, so
that nothing of one is taken for another's: neither keys and values in kept blocks, nor requests that still run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.adapter_products import (
    AdaptedLinear,
    AdaptedProduct,
    AdapterRows,
    LowRank,
    adapted_products,
)
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.weights.damage import MAX_JSON_NBYTES, json_object_of, readable
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What would change the result and is not implemented -> the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None, []),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "bias": ("none", None),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_dora": (None, False),
    "use_qalora": (None, False),
}
# What changes no answer: how an adapter was trained, and where it was put, which its tensors say.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision", "task_type"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "rank_pattern", "target_modules"),
    *("corda_config", "eva_config", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config"),
    *("megatron_config", "megatron_core", "qalora_group_size", "runtime_config"),
    *("ensure_weight_tying", "fan_in_fan_out", "inference_mode", "lora_alpha", "r", "use_rslora"),
}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Contents of a PEFT directory, read once: what becomes of the directory then changes nothing."""

    source: str  # the directory, for messages
    config: bytes
    weights: bytes  # safetensors

    def key_of(self, name: str) -> str:
        """Return the key of these contents under the name ``name``.

        Example:
            >>> AdapterFiles("a", b"{}", b"").key_of("pirate")
            'pirate@44136fa355b3678a'
        """
        digest = sha256(self.config)
        digest.update(self.weights)
        return f"{name}@{digest.hexdigest()[:16]}"


def read_adapter(path: Path | str) -> AdapterFiles:
    """Read the adapter in directory ``path``; nothing of it is checked yet.

    Raises:
        InvalidInputError: a file is missing, is no regular file, or cannot be read.
    """
    where = Path(path).expanduser()
    contents = {}
    for name, most in ((CONFIG_FILE, MAX_JSON_NBYTES), (WEIGHTS_FILE, None)):
        with readable(where / name):
            if not (where / name).is_file():
                raise InvalidInputError(f"{where} is no PEFT adapter: it has no {name}")
            if most is not None and (nbytes := (where / name).stat().st_size) > most:
                raise InvalidInputError(f"{where / name} has {nbytes:,} bytes; {most:,} are the most here")
            contents[name] = (where / name).read_bytes()
    return AdapterFiles(str(where), contents[CONFIG_FILE], contents[WEIGHTS_FILE])


class AdaptedDecoder:
    """A :class:`~mlsys_orca.model.decoder.DecoderModel` whose requests may each name an adapter.

    Args:
        decoder: In torch's operators; it is changed.
        adapters: Name, or the key that requests give, -> PEFT directory or its contents.

    Raises:
        InvalidInputError: the model is of no kind that takes adapters, or one does not fit it, or it is damaged.

    Example:
        >>> AdaptedDecoder(load_model(path, backend="torch").model, {"pirate": "adapters/pirate"})  # doctest: +SKIP
    """

    def __init__(self, decoder: DecoderModel, adapters: Mapping[str, Path | str | AdapterFiles]) -> None:
        if not isinstance(decoder, Decoder):
            raise InvalidInputError(f"adapters go on a decoder in torch's operators, not on a {type(decoder).__name__}")
        if decoder.config.recurrent is not None:
            raise InvalidInputError("adapters go on attention and MLPs; this model has recurrent layers")
        self.decoder = decoder
        self.config: ModelConfig = decoder.config
        self.dtype = decoder.dtype
        self.device = decoder.device
        self._rows = AdapterRows()
        self._products = adapted_products(decoder, self._rows)
        self._keys: frozenset[str] = frozenset()
        for key, found in adapters.items():
            self.add(key, found if isinstance(found, AdapterFiles) else read_adapter(found))

    @property
    def adapters(self) -> frozenset[str]:
        """Keys that a request may give."""
        return self._keys

    def add(self, key: str, files: AdapterFiles) -> None:
        """Add an adapter.

        Raises:
            InvalidInputError: it does not fit the model, or is damaged; nothing of it is added.
        """
        with readable(files.source):
            made = _fitted(files, self._products, self.decoder)
        for linear, parts in made.items():
            linear.parts[key] = parts
        self._keys |= {key}

    @property
    def module(self) -> Decoder:
        """The model itself."""
        return self.decoder

    def __call__(self, inputs: ForwardInputs, kv_cache: Any) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size]."""
        rows: dict[str, list[int]] = {}
        if not inputs.batch.is_plain:
            for request in inputs.batch.requests:
                if request.details is not None and request.details.adapter is not None:
                    rows.setdefault(request.details.adapter, []).extend(range(request.start, request.stop))
        self._rows.by_adapter = {name: torch.tensor(found, device=self.device) for name, found in rows.items()}
        logits: Tensor = self.decoder(inputs, kv_cache)
        return logits


def _fitted(
    files: AdapterFiles, products: Mapping[str, AdaptedProduct], decoder: Decoder
) -> dict[AdaptedLinear, list[tuple[int, LowRank]]]:
    """Return what the adapter adds to each product."""
    path = files.source
    scale_of_rank = _read_config(files)
    try:
        tensors = load(files.weights)
    except SafetensorError as error:
        raise InvalidInputError(f"{path} has no readable {WEIGHTS_FILE}: {error}") from error
    modules = {key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in tensors}
    made: dict[AdaptedLinear, list[tuple[int, LowRank]]] = {}
    for module in sorted(modules):
        down, up = (tensors.get(f"{_PREFIX}{module}.lora_{side}.weight") for side in "AB")
        if module not in products or down is None or up is None:
            raise InvalidInputError(
                f"{path}: the adapter changes {module or 'something unnamed'!r}, which is no pair of lora_A and lora_B "
                f"of a product that this model has (there are: {', '.join(sorted(products)[:4])}, ...)"
            )
        product = products[module]
        if down.ndim != 2 or up.ndim != 2 or not len(down):
            raise InvalidInputError(f"{path}: {module} has A {tuple(down.shape)} and B {tuple(up.shape)}, no matrices")
        if (len(up), down.shape[1]) != product.whole_shape() or down.shape[0] != up.shape[1]:
            raise InvalidInputError(
                f"{path}: {module} is of another model: A {tuple(down.shape)} and B {tuple(up.shape)} do not make "
                f"{list(product.whole_shape())}"
            )
        dtype, scale = decoder.dtype, scale_of_rank(len(down))
        part = LowRank(down.to(decoder.device, dtype), (up.float() * scale).to(decoder.device, dtype))
        made.setdefault(product.linear, []).append((product.column, part))
    return made


def _read_config(files: AdapterFiles) -> Any:
    """Return the function from a rank to the scale."""
    path = files.source
    try:
        raw = json_object_of(files.config, f"{path}/{CONFIG_FILE}")
        alpha, use_rslora = float(raw["lora_alpha"]), bool(raw.get("use_rslora"))
    except (InvalidInputError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{path} is no PEFT adapter: {CONFIG_FILE}: {error!r}") from error
    if not math.isfinite(alpha):
        raise InvalidInputError(f"{path}: the adapter's lora_alpha is {alpha}; it must be finite")
    if raw.get("peft_type") != "LORA":
        raise InvalidInputError(f"{path}: the adapter is of type {raw.get('peft_type')!r}; 'LORA' is implemented")
    for key, neutral in _NEUTRAL.items():
        if raw.get(key) not in neutral:
            raise InvalidInputError(f"{path}: the adapter has {key} = {raw[key]!r}, which is not implemented")
    unknown = sorted(
        key for key in raw.keys() - _HARMLESS - _NEUTRAL.keys() if raw[key] not in (None, False, [], {}, "")
    )
    if unknown:
        raise InvalidInputError(
            f"{path}: the adapter has {unknown[0]} = {raw[unknown[0]]!r}, which is not known here; "
            f"if it changes no answer, leave it out of {CONFIG_FILE}"
        )
    return lambda rank: alpha / (rank**0.5 if use_rslora else rank)
