"""A directory that ``transformers`` runs, since no family has its architecture.

The other branch of :mod:`mlsys_orca.loading.huggingface`. No code from the directory is run, nothing is downloaded, and
pickled weights are refused as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError

from mlsys_orca.backends.transformers.attention import RAGGED, attention_layout, register
from mlsys_orca.backends.transformers.decoder import TransformersDecoder
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.config import ModelConfig, UnsupportedModelError, refuse
from mlsys_orca.model.config_readers import refuse_common
from mlsys_orca.model.weights.checkpoint import Progress, WeightForm
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_transformers_config(path: Path, raw: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the configuration, and the tokens of context in which this is exact.

    Rotary scaling that depends on the length of the batch it is computed in would make an answer depend on its
    neighbours: ``dynamic`` and ``longrope`` are cut to the context in which they change nothing.

    Args:
        path: The directory.
        raw: Its ``config.json``.

    Raises:
        UnsupportedModelError: it is no decoder of text that keeps keys and values only.
        MissingDependencyError: ``transformers`` is not installed.
    """
    refuse(raw.get("quantization_config") is not None, "weights quantised by other tools (quantization_config)")
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        refuse_common(part)
        for key, what in _OTHERWISE.items():
            refuse(bool(part.get(key)), f"{what} ({key})")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the architecture {raw['model_type']!r} runs through transformers only, which is not installed: "
            'pip install "mlsys-orca[transformers]"'
        ) from error
    try:
        whole: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError) as error:
        if raw["model_type"] in transformers.CONFIG_MAPPING:  # it has the architecture, and this is none of it
            said = (str(error).strip().splitlines() or [""])[-1][:200]
            raise InvalidInputError(f"{path} has a configuration that transformers refuses: {said}") from error
        raise UnsupportedModelError(
            f"an architecture that transformers {transformers.__version__} does not have, and code from the "
            "model's directory is never run"
        ) from error
    refuse(bool(whole.is_encoder_decoder), "an encoder beside the decoder")
    config: Any = whole.get_text_config()
    refuse(config is not whole, "parts beside its text, such as one that sees")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    refuse(bool(unknown), f"layers of type {', '.join(map(repr, unknown))} (full and sliding attention are)")
    max_positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_positions, int) or max_positions < 2:
        raise UnsupportedModelError("a context without a limit (config.json has no max_position_embeddings)")
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or max_positions
        if rope["rope_type"] == "longrope":
            max_positions = min(max_positions, original)
        elif rope["rope_type"] == "dynamic":
            max_positions = min(max_positions, original)
            rope["rope_type"] = "default"
    config.use_cache = False
    return config, max_positions


# Keys of config.json that make a model something else than a stack of attention and MLPs.
_OTHERWISE = {
    "alibi": "a bias by distance",
    "num_kv_shared_layers": "layers that read the keys and values of others",
    "kv_lora_rank": "latent attention",
    "is_encoder_decoder": "an encoder beside the decoder",
}


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings: one, or one per type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (part for part in rope.values() if isinstance(part, dict) and "rope_type" in part)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A directory that ``transformers`` can run for us. Owner: the loader, while it loads."""

    path: Path
    source: Any  # transformers' configuration
    config: ModelConfig
    options: tuple[AttentionOptions, ...]  # by layer

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightForm = "float",
        progress: Progress | None = None,
    ) -> TransformersDecoder:
        """Read the weights, and see that the model computes what it does with its own attention.

        Args:
            dtype: Dtype of weights, keys and values.
            device: Where to put them.
            weights: Storage form of matrices.
            progress: Called when all are read; ``transformers`` says no more.

        Raises:
            InvalidInputError: weights are missing, misshapen, left over or pickled, or the comparison fails.
        """
        if weights in ("int8", "int4"):
            raise InvalidInputError(
                f"{self.path} runs through transformers, whose weights are not quantised here: load it with "
                "weights='float'"
            )
        import transformers

        files = SafetensorsDirectory(self.path)
        with quiet_transformers():
            model: Any = transformers.AutoModelForCausalLM
            module, found = model.from_pretrained(
                self.path,
                config=self.source,
                attn_implementation=RAGGED,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        check_found(self.path, found)
        module.to(device).eval()
        decoder = TransformersDecoder(module, self.config, options=self.options, dtype=dtype, device=device)
        decoder.verify()
        if progress:
            nbytes = sum(map(files.nbytes, files.names))
            progress(nbytes, nbytes)
        return decoder


def open_fallback(path: Path, raw: Mapping[str, Any]) -> Fallback:
    """Judge the model in directory ``path``, whose ``config.json`` is ``raw``, before a weight is read.

    Raises:
        UnsupportedModelError: the ragged attention and the K/V cache can't run it; the message names the part.
        MissingDependencyError: ``transformers`` is not installed.
    """
    source, max_positions = read_transformers_config(path, raw)
    register()
    layout = attention_layout(source, max_positions)
    config = ModelConfig(
        architecture=source.model_type,
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=getattr(source, "intermediate_size", None) or 4 * source.hidden_size,
        num_layers=len(layout.options),
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        max_positions=max_positions,
        norm_eps=getattr(source, "rms_norm_eps", None) or 1e-5,
    )
    return Fallback(path, source, config, layout.options)


def check_found(path: Path, found: Mapping[str, Any]) -> None:
    """See that ``transformers`` found the weights it looked for in directory ``path``, and no others.

    Raises:
        InvalidInputError: it did not.
    """
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if names := sorted(map(str, found.get(kind) or ())):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InvalidInputError(
                f"{path}: its weights and its configuration do not belong together, "
                f"{kind.replace('_', ' ')}: {names[0]}{more}"
            )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Have ``transformers`` load without a bar and a report; what it found is judged here."""
    import transformers

    logging: Any = transformers.utils.logging
    shows, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows:
            logging.enable_progress_bar()
