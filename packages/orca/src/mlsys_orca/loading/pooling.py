"""Rules by which a directory's sentence encoder pools a text's states: the files of sentence-transformers.

Read by :func:`mlsys_orca.engine.embedding.load_encoder` beside the model's own files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.loading.huggingface import read_json
from mlsys_orca.model.config import refuse
from mlsys_orca.model.weights.damage import inside

PoolingMode = Literal["cls", "mean"]
_MODES: dict[str, PoolingMode] = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """Steps after the encoder, and the prompt before the text. A directory that says nothing has the defaults."""

    mode: PoolingMode = "mean"  # "cls": the first token's state; "mean": the mean of all tokens' states
    normalize: bool = False  # to length 1
    max_tokens: int | None = None  # of a text; None: what the encoder was made for
    prompt: str = ""  # goes before every text
    encoder: str = ""  # the directory of the encoder's own files, below the given one


def read_pooling(path: Path) -> Pooling:
    """Read the pooling that the files of directory ``path`` describe.

    Raises:
        InvalidInputError: one is damaged, or asks for what is not implemented.
    """
    file = path / "modules.json"
    if not file.is_file():
        return Pooling()
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        steps = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInputError(f"{file} is no list of modules with a type and a path: {error}") from error
    for folder in steps.values():
        inside(path, folder)
    names = list(steps)
    refuse(
        names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]),
        f"the modules {', '.join(names)} ({file.name}; Transformer, Pooling and Normalize in this order are)",
    )
    encoder = path / steps["Transformer"]
    options = read_json(encoder / "sentence_bert_config.json", optional=True)
    refuse(bool(options.get("do_lower_case")), "texts in lower case beside what the tokenizer does (do_lower_case)")
    pooling = read_json(path / steps["Pooling"] / "config.json")
    prompts = read_json(path / "config_sentence_transformers.json", optional=True)
    prompt = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "", "")
    refuse(bool(prompt) and not pooling.get("include_prompt", True), "pooling without the prompt (include_prompt)")
    return Pooling(
        mode=_mode(pooling),
        normalize="Normalize" in steps,
        max_tokens=options.get("max_seq_length"),
        prompt=prompt,
        encoder=steps["Transformer"],
    )


def _mode(config: dict[str, Any]) -> PoolingMode:
    chosen = [key.removeprefix("pooling_mode_") for key, value in config.items() if "pooling_mode_" in key and value]
    if isinstance(config.get("pooling_mode"), str):
        chosen = [config["pooling_mode"]]
    refuse(len(chosen) != 1 or chosen[0] not in _MODES, f"pooling by {' and '.join(chosen) or 'nothing'} (cls or mean)")
    return _MODES[chosen[0]]
