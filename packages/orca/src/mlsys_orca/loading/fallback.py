"""A directory whose architecture no family of ours runs: judged, then loaded through ``transformers``.

The other branch of :mod:`mlsys_orca.loading.huggingface`. No code from the directory is run, nothing is downloaded, and
pickled weights are refused as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError

from mlsys_orca.backends.transformers.attention import RAGGED, register
from mlsys_orca.backends.transformers.config import read_transformers_config
from mlsys_orca.backends.transformers.decoder import TransformersDecoder
from mlsys_orca.backends.transformers.image_rules import Vision
from mlsys_orca.backends.transformers.layout import attention_layout
from mlsys_orca.backends.transformers.vision import ImageEncoder, text_part
from mlsys_orca.model.attention import AttentionOptions
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.weights.checkpoint import Progress, WeightForm
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from mlsys_orca.text.image_reader import ImageReader
from mlsys_orca.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Fallback:
    """A directory that ``transformers`` can run for us. Owner: the loader, while it loads."""

    path: Path
    source: Any  # transformers' configuration
    config: ModelConfig
    options: tuple[AttentionOptions, ...]  # by layer
    vision: Vision | None = None  # None: it reads text alone

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

        whole: Any = transformers.AutoModelForCausalLM
        attention: Any = RAGGED
        if self.vision is not None:
            whole = transformers.AutoModelForImageTextToText
            attention = {"text_config": RAGGED, "vision_config": "sdpa"}  # whole tiles of one size
        files = SafetensorsDirectory(self.path)
        module, found = read_whole(whole, self.path, self.source, attention=attention, dtype=dtype)
        check_found(self.path, found)
        module.to(device).eval()
        images = None
        if self.vision is not None:
            images, module = ImageEncoder(module, self.vision), text_part(module)
        decoder = TransformersDecoder(
            module, self.config, options=self.options, dtype=dtype, device=device, images=images
        )
        decoder.verify()
        if progress:
            nbytes = sum(map(files.nbytes, files.names))
            progress(nbytes, nbytes)
        return decoder

    @property
    def image_reader(self) -> Callable[[Tokenizer], ImageReader] | None:
        """Maker of what reads images for the model; None: it reads text alone."""
        return None if self.vision is None else partial(ImageReader, self.vision)


def read_whole(kind: Any, path: Path, config: Any, *, attention: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return the model in directory ``path`` as ``transformers`` reads it, and what it found of the weights.

    Args:
        kind: One of its ``AutoModel...`` classes.
        path: Safetensors alone are read, and no code.
        config: Its configuration.
        attention: Its name of an attention, or names by part.
        dtype: Dtype of the weights.
    """
    with quiet_transformers():
        model, found = kind.from_pretrained(
            path,
            config=config,
            attn_implementation=attention,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    return model, found


def open_fallback(path: Path, raw: Mapping[str, Any]) -> Fallback:
    """Judge the model in directory ``path``, whose ``config.json`` is ``raw``, before a weight is read.

    Raises:
        UnsupportedModelError: the ragged attention and the K/V cache can't run it; the message names the part.
        MissingDependencyError: ``transformers`` is not installed.
    """
    whole, source, max_positions = read_transformers_config(path, raw)
    register()
    layout = attention_layout(source, max_positions)
    config = ModelConfig(
        architecture=whole.model_type,
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
    vision = None if whole is source else Vision.of(path, whole)
    return Fallback(path, whole, config, layout.options, vision)


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
